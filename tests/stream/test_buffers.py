"""Memory is used again, and never while anybody can still see it."""

import gc

import torch

from compgen_fast.stream.buffers import KEPT, Buffers


def test_memory_is_used_again_once_the_tensor_is_gone() -> None:
    buffers = Buffers((4, 5), pinned=False)
    first = buffers.take()
    place = first.data_ptr()
    del first
    assert buffers.take().data_ptr() == place


def test_memory_that_is_seen_through_any_view_is_not_given_out() -> None:
    buffers = Buffers((4, 5), pinned=False)
    views = []
    for make in (
        lambda t: t[1:2],
        lambda t: t.view(-1),
        lambda t: t.numpy(),
        lambda t: t.numpy()[2:],
        lambda t: t.untyped_storage(),
        lambda t: t.detach(),
        lambda t: t.permute(1, 0),
        lambda t: t.view(torch.int8),
    ):
        tensor = buffers.take()
        tensor.fill_(len(views))
        views.append(make(tensor))
        del tensor
        gc.collect()
    for value, view in enumerate(views):
        assert set(
            bytes(view) if isinstance(view, torch.UntypedStorage) else torch.as_tensor(view).flatten().tolist()
        ) == {value}


def test_a_burst_of_batches_is_not_kept_for_ever() -> None:
    buffers = Buffers((4, 5), pinned=False)
    many = [buffers.take() for _ in range(5 * KEPT)]
    assert len({tensor.data_ptr() for tensor in many}) == 5 * KEPT
    del many
    assert len(buffers._free) == KEPT and not buffers._lent
