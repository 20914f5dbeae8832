"""The PatchDecoder module. What all decoders must do is in test_build.py."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compgen_fast.models import CrossAttentionDecoder, PatchDecoder

SMALL: dict[str, Any] = {"heads": 2, "head_dim": 5, "query_dim": 12, "slot_hidden": 20, "octaves": 3}


def test_patches_of_one_pixel_are_the_cross_attention_decoder() -> None:
    patches, pixels = PatchDecoder(8, 6, patch=1, **SMALL), CrossAttentionDecoder(8, 6, **SMALL)
    pixels.load_state_dict(patches.patches.state_dict())
    z = torch.randn(2, 3, 8)
    assert torch.equal(patches(z), pixels(z))
    for found, expected in zip(patches.decode_with_masks(z), pixels.decode_with_masks(z), strict=True):
        assert torch.equal(found, expected)


def test_a_patch_lies_in_the_image_as_it_was_decoded() -> None:
    decoder, z = PatchDecoder(8, 6, patch=2, **SMALL), torch.randn(1, 3, 8)
    image = decoder(z).view(6, 6, 3)
    patch = decoder.patches(z)[0, 5].view(2, 2, 3)  # the last of the second row of patches
    assert torch.equal(image[2:4, 4:6], patch)
    assert decoder.patch_pixels[5].tolist() == [2 * 6 + 4, 2 * 6 + 5, 3 * 6 + 4, 3 * 6 + 5]


@settings(max_examples=15)
@given(grid=st.integers(1, 4), patch=st.integers(1, 4), data=st.data())
def test_any_pixels_decode_as_in_the_whole_image_with_masks_too(grid: int, patch: int, data: Any) -> None:
    decoder, z = PatchDecoder(4, grid * patch, patch=patch, layers=1, **SMALL), torch.randn(1, 3, 4)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, decoder.num_pixels - 1), min_size=1, max_size=9)))
    whole, masks = decoder.decode_with_masks(z)
    colours, some = decoder.decode_with_masks(z, chosen)
    torch.testing.assert_close(colours, whole[:, chosen])
    torch.testing.assert_close(some, masks[:, :, chosen])
    torch.testing.assert_close(decoder(z, pixels=chosen), whole[:, chosen])


def test_only_the_patches_of_the_pixels_asked_for_are_decoded() -> None:
    decoder, seen = PatchDecoder(8, 6, patch=3, **SMALL), list[Tensor]()
    decoder.patches.register_forward_hook(lambda module, inputs, output: seen.append(output))
    decoder(torch.randn(2, 3, 8), pixels=decoder.patch_pixels[[3, 1]].flatten())
    assert seen[0].shape == (2, 2, 27)


def test_a_mask_is_one_value_per_patch_and_shares_out_every_pixel() -> None:
    decoder = PatchDecoder(8, 6, patch=3, **SMALL)
    _, masks = decoder.decode_with_masks(torch.randn(2, 3, 8))
    by_patch = masks[:, :, decoder.patch_pixels]
    assert torch.equal(by_patch, by_patch[..., :1].expand_as(by_patch))
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 36))


def test_a_patch_that_does_not_divide_the_image_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="image_size 6 cannot be cut into patches of 4; choose a divisor"):
        PatchDecoder(8, 6, patch=4)
