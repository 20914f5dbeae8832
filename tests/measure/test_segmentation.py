"""Segmentations and their scores: against scikit-learn, and Jacobians against fp64 central differences."""

import warnings

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn

from compgen_fast.jets import interaction_penalty
from compgen_fast.measure import ari, jacobian_norms, masks_by_attention, masks_by_jacobian, mbo
from compgen_fast.models import AdditiveDecoder, CrossAttentionDecoder, PatchDecoder, SpatialBroadcastDecoder
from tests.jets import decoders


def halves(z: Tensor) -> Tensor:
    """Slot 0 paints the first half of 6 pixels, slot 1 the other; each pixel in its own way."""
    painted = torch.arange(1, 4)[:, None] * torch.sin(z.sum(-1))[:, :, None, None]
    return painted.flatten(1, 2).expand(-1, -1, 3)


HALVES = torch.tensor([0, 0, 0, 1, 1, 1])


def scored_by_sklearn(predicted: Tensor, true: Tensor) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # many labels for few pixels
        return [adjusted_rand_score(t.tolist(), p.tolist()) for p, t in zip(predicted, true, strict=True)]


@pytest.mark.parametrize(("slots", "objects", "pixels"), [(3, 3, 50), (7, 2, 40), (1, 4, 20), (4, 1, 20), (9, 9, 5)])
def test_ari_is_scikit_learns(slots: int, objects: int, pixels: int) -> None:
    predicted, true = torch.randint(slots, (30, pixels)), torch.randint(objects, (30, pixels))
    predicted[:10] = torch.where(torch.rand(10, pixels) < 0.7, true[:10] % slots, predicted[:10])
    expected = torch.tensor(scored_by_sklearn(predicted, true), dtype=torch.float64)
    torch.testing.assert_close(ari(predicted, true, ignore_background=False), expected, atol=1e-12, rtol=0)


def test_foreground_ari_sees_only_pixels_of_objects() -> None:
    predicted, true = torch.randint(4, (20, 60)), torch.randint(3, (20, 60))
    expected = [scored_by_sklearn(p[None, t > 0], t[None, t > 0])[0] for p, t in zip(predicted, true, strict=True)]
    found = ari(predicted, true.to(torch.uint8), ignore_background=True)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_partition_agrees_with_itself_whatever_its_numbers() -> None:
    true = torch.randint(3, (5, 40))
    renamed = torch.tensor([7, 0, 4])[true]
    assert (ari(renamed, true, ignore_background=False) == 1).all()
    assert (mbo(renamed, true) == 1).all()


def test_one_segment_of_a_large_image_agrees_exactly() -> None:
    one = torch.zeros(1, 128 * 128, dtype=torch.int64)
    assert ari(one, one, ignore_background=False).tolist() == [1]


def test_permuted_slots_score_alike() -> None:
    predicted, true = torch.randint(4, (9, 50)), torch.randint(3, (9, 50))
    permuted = torch.tensor([2, 0, 3, 1])[predicted]
    for background in (True, False):
        before, after = (ari(p, true, ignore_background=background) for p in (predicted, permuted))
        torch.testing.assert_close(before, after)
    torch.testing.assert_close(mbo(predicted, true), mbo(permuted, true))


def test_images_without_foreground_have_no_score() -> None:
    predicted, true = torch.randint(3, (2, 10)), torch.zeros(2, 10, dtype=torch.int64)
    true[1, :5] = 1
    assert ari(predicted, true, ignore_background=True).isnan().tolist() == [True, False]
    assert mbo(predicted, true).isnan().tolist() == [True, False]
    assert not ari(predicted, true, ignore_background=False).isnan().any()


def test_mean_best_overlap_of_a_small_image_by_hand() -> None:
    true = torch.tensor([[0, 0, 1, 1, 1, 2]])
    predicted = torch.tensor([[0, 0, 0, 1, 1, 1]])
    # object 1: segment 1 shares 2 of 4 pixels; object 2: 1 of 3; the background: segment 0 shares 2 of 3
    assert mbo(predicted, true).item() == pytest.approx((2 / 4 + 1 / 3) / 2)
    assert mbo(predicted, true, ignore_background=False).item() == pytest.approx((2 / 3 + 2 / 4 + 1 / 3) / 3)


def test_objects_absent_from_an_image_do_not_lower_its_overlap() -> None:
    true = torch.tensor([[0, 1, 1, 0], [0, 1, 2, 3]])
    assert mbo(true, true).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("predicted", "true"),
    [
        (torch.rand(2, 4), torch.zeros(2, 4).long()),
        (torch.zeros(2, 4).long(), torch.zeros(2, 5).long()),
        (torch.zeros(2, 2, 2).long(), torch.zeros(2, 2, 2).long()),
        (torch.zeros(2, 4).long() - 1, torch.zeros(2, 4).long()),
        (torch.zeros(2, 4).long(), torch.full((2, 4), 256)),
    ],
)
def test_labels_that_are_none_are_refused(predicted: Tensor, true: Tensor) -> None:
    with pytest.raises(ValueError, match="ari: "):
        ari(predicted, true, ignore_background=False)


def central_differences(decoder: nn.Module, z: Tensor, step: float = 1e-5) -> Tensor:
    squares = []
    for column in torch.eye(z[0].numel(), dtype=z.dtype).view(-1, *z.shape[1:]) * step:
        squares.append(((decoder(z + column) - decoder(z - column)) / (2 * step)).square().sum(-1))
    return torch.stack(squares, 1).unflatten(1, z.shape[1:]).sum(2).sqrt()


EVERY_KIND: dict[str, nn.Module] = {
    "additive": AdditiveDecoder(decoders.CODE, 4, layers=2, width=8, octaves=3),
    "broadcast": SpatialBroadcastDecoder(decoders.CODE, 4, layers=2, width=8, octaves=3),
    "broadcast by convolution": SpatialBroadcastDecoder(decoders.CODE, 4, kind="cnn", layers=2, width=8, octaves=3),
    "cross-attention": decoders.Reference(),
    "patches": PatchDecoder(decoders.CODE, 4, patch=2, heads=2, head_dim=5, query_dim=8, slot_hidden=8, octaves=2),
    "torch's fused attention": decoders.Transformer(),
    "slot_cross_attention": decoders.SlotTransformer(),
    "projected_slot_attention": decoders.ProjectedTransformer(),
    "torch's transformer layer": decoders.SelfAttending(),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
@torch.no_grad()
def test_jacobian_norms_are_exact_for_every_kind_of_decoder(kind: str) -> None:
    decoder, z = EVERY_KIND[kind].double(), decoders.slots(B=2, K=3)
    norms = jacobian_norms(decoder, z)
    torch.testing.assert_close(norms, central_differences(decoder, z), atol=1e-8, rtol=1e-6)
    assert not norms.requires_grad
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_norms_agree_with_the_contrast_of_the_jets() -> None:
    """One colour per pixel: then an output of the contrast is a pixel here. Two ways to the same Jacobian."""
    decoder, z = decoders.Transformer().double(), decoders.slots(B=3, K=4)
    norms = jacobian_norms(lambda z: decoder(z)[..., :1], z)
    pairs = (norms.sum(1).square() - norms.square().sum(1)) / 2
    expected = interaction_penalty(lambda z: decoder(z)[..., :1], z, method="contrast")
    torch.testing.assert_close(pairs.sum() / len(z), expected.detach())


def test_chunks_and_inference_mode_change_no_norm() -> None:
    decoder, z = decoders.Reference(), torch.randn(5, 3, decoders.CODE)
    whole = jacobian_norms(decoder, z, chunk=5)
    torch.testing.assert_close(jacobian_norms(decoder, z, chunk=2), whole)
    with torch.inference_mode():
        torch.testing.assert_close(jacobian_norms(decoder, z.clone(), chunk=5), whole)


def test_a_decoder_that_ignores_its_slots_has_no_gradient() -> None:
    assert (jacobian_norms(lambda z: torch.ones(len(z), 4, 3), torch.randn(2, 3, 5)) == 0).all()


def test_images_instead_of_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="expected pixels"):
        jacobian_norms(lambda z: z.view(2, 1, 3, 4), torch.randn(2, 3, 4))


def test_slots_that_own_half_the_image_each_are_found() -> None:
    found = masks_by_jacobian(halves, torch.randn(4, 2, 3))
    assert (ari(found, HALVES.expand(4, -1), ignore_background=False) == 1).all()


def test_an_additive_decoder_has_a_jacobian_segmentation() -> None:
    decoder, z = AdditiveDecoder(5, 8, layers=2, width=8, octaves=3), torch.randn(3, 4, 5)
    found = masks_by_jacobian(decoder, z)
    assert found.shape == (3, 64) and found.dtype == torch.int64
    assert ari(found, torch.randint(3, (3, 64)), ignore_background=False).isfinite().all()


def test_permuted_slots_are_segmented_alike() -> None:
    decoder, z = (
        CrossAttentionDecoder(5, 8, heads=2, head_dim=4, query_dim=8, slot_hidden=8).double(),
        torch.randn(2, 4, 5),
    )
    order = torch.tensor([2, 0, 3, 1])
    before, after = masks_by_jacobian(decoder, z.double()), masks_by_jacobian(decoder, z[:, order].double())
    assert torch.equal(order[after], before)


def test_attention_masks_are_the_decoders_own() -> None:
    decoder, z = SpatialBroadcastDecoder(5, 8, layers=2, width=8, octaves=3), torch.randn(5, 4, 5)
    expected = decoder.decode_with_masks(z)[1].argmax(1)
    assert torch.equal(masks_by_attention(decoder, z, chunk=2), expected)


def test_a_decoder_without_masks_is_told_of_the_jacobian() -> None:
    with pytest.raises(ValueError, match="use masks_by_jacobian"):
        masks_by_attention(AdditiveDecoder(5, 8, layers=2, width=8), torch.randn(1, 2, 5))
