"""Which slot stands for which object, by masks. The assignment itself is tested in tests/models/test_matching.py."""

import pytest
import torch
from torch import Tensor

from compgen_fast.measure import match_by_masks


def test_each_object_gets_the_slot_that_covers_it() -> None:
    masks = torch.zeros(2, 4, 4, dtype=torch.uint8)
    masks[0, :2, :2], masks[1, 2:, 2:] = 1, 1
    masks[:, 0, 3] = 2
    hard = torch.nn.functional.one_hot(masks.long(), 4).movedim(-1, 1).float()
    order = torch.tensor([[3, 1, 0, 2], [2, 0, 3, 1]])
    slot_masks = 0.7 * hard.take_along_dim(order[:, :, None, None], 1) + 0.1
    matched = match_by_masks(slot_masks, masks)
    assert matched.shape == (2, 3)
    assert order.take_along_dim(matched, 1).tolist() == [[0, 1, 2]] * 2


def test_a_slot_that_covers_everything_does_not_win_an_object() -> None:
    """Slot 0 covers all of the object, slot 1 nine tenths of it: by mass slot 0 would win, but it spills over."""
    masks = torch.zeros(1, 4, 4, dtype=torch.uint8)
    masks[0, 0, :2] = 1
    slot_masks = torch.stack([torch.ones(4, 4), 0.9 * (masks[0] == 1), (masks[0] == 0).float()])[None]
    assert match_by_masks(slot_masks, masks).tolist() == [[2, 1]]


def test_chunks_of_images_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_masks, masks = torch.rand(7, 4, 3, 3), torch.randint(0, 3, (7, 3, 3), dtype=torch.uint8)
    whole = match_by_masks(slot_masks, masks, 3)
    monkeypatch.setattr("compgen_fast.measure.matching.CHUNK", 2)
    assert torch.equal(match_by_masks(slot_masks, masks, 3), whole)


def test_objects_missing_from_every_image_still_get_a_slot() -> None:
    matched = match_by_masks(torch.rand(2, 4, 3, 3), torch.zeros(2, 3, 3, dtype=torch.uint8), objects=3)
    assert matched.shape == (2, 3)
    assert all(len(set(row)) == 3 for row in matched.tolist())


@pytest.mark.parametrize(
    ("masks", "objects"),
    [(torch.zeros(2, 3, 4).long(), None), (torch.zeros(2, 3, 3), None), (torch.full((2, 3, 3), 2), 2)],
)
def test_masks_that_do_not_fit_are_refused(masks: Tensor, objects: int | None) -> None:
    with pytest.raises(ValueError, match="match_by_masks"):
        match_by_masks(torch.rand(2, 4, 3, 3), masks, objects)
