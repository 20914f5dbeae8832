"""Where searches begin."""

import pytest
import torch
from torch import Tensor

from compgen_fast.invert import SlotMarginals, starts


def numbered(images: int = 6, slots: int = 3) -> Tensor:
    """Latents [images, slots, 2] that say where they come from."""
    image, slot = torch.meshgrid(torch.arange(images), torch.arange(slots), indexing="ij")
    return torch.stack([image, slot], -1).float()


def test_the_first_start_is_the_encoders() -> None:
    encoded = numbered()
    found = starts(encoded, SlotMarginals.fit(encoded), swapped=2, drawn=3)
    assert found.shape == (6, 6, 3, 2) and torch.equal(found[:, 0], encoded)
    assert torch.equal(starts(encoded), encoded.unsqueeze(1))


def test_a_swapped_start_has_one_slot_of_another_image_at_its_place() -> None:
    encoded = numbered()
    swapped = starts(encoded, swapped=40)[:, 1:]
    assert torch.equal(swapped[..., 1], encoded[:, None, :, 1].expand(-1, 40, -1))  # every slot at its place
    foreign = swapped[..., 0] != encoded[:, None, :, 0]
    assert (foreign.sum(2) == 1).all()
    assert foreign.any(1).all()  # any slot
    assert all(swapped[image, :, :, 0].unique().numel() == 6 for image in range(6))  # any image


def test_a_drawn_start_has_nothing_of_the_encoder() -> None:
    encoded, seen = numbered(), numbered() + 100
    drawn = starts(encoded, SlotMarginals.fit(seen), drawn=30)[:, 1:]
    assert (drawn[..., 0] >= 100).all()
    assert torch.equal(drawn[..., 1] - 100, encoded[:, None, :, 1].expand(-1, 30, -1))
    assert (drawn[..., 0, 0] != drawn[..., 1, 0]).any()


def test_choices_repeat_with_their_generator() -> None:
    encoded = numbered(40)
    marginals = SlotMarginals.fit(encoded)
    once, again, other = (
        starts(encoded, marginals, swapped=2, drawn=2, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(once, again) and not torch.equal(once, other)


def test_starts_have_the_dtype_of_the_encoders_latents() -> None:
    encoded = numbered().to(torch.bfloat16)
    assert starts(encoded, SlotMarginals.fit(encoded), swapped=1, drawn=1).dtype == torch.bfloat16


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    encoded = numbered()
    marginals = SlotMarginals.fit(encoded)
    with pytest.raises(ValueError, match=r"encoded is torch.float32 \[6, 3\]; expected the encoder's floating latents"):
        starts(encoded[..., 0])
    with pytest.raises(ValueError, match=r"encoded is torch\.int64"):
        starts(encoded.long())
    with pytest.raises(ValueError, match="swapped is -1 and drawn 0; expected 0 or more"):
        starts(encoded, swapped=-1)
    with pytest.raises(ValueError, match="2 swapped starts need slots of other images"):
        starts(encoded[:1], swapped=2)
    with pytest.raises(ValueError, match="1 drawn starts need marginals"):
        starts(encoded, drawn=1)
    with pytest.raises(ValueError, match=r"marginals have slots \[3, 2\] and encoded \[2, 2\]"):
        starts(encoded[:, :2], marginals, drawn=1)
