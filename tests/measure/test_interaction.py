"""How much slots interact, on decoders whose answer is known."""

import pytest
import torch
from torch import Tensor

from compgen_fast.jets import interaction_penalty
from compgen_fast.measure import block_hessian, jacobian_norms, jis
from compgen_fast.models import AdditiveDecoder
from tests.jets import decoders
from tests.measure.test_segmentation import halves


def product(z: Tensor) -> Tensor:
    """Pixel i is z_0i · z_1i: bent across slots and nowhere else."""
    return (z[:, 0] * z[:, 1]).unsqueeze(-1)


def test_slots_that_own_half_the_image_each_do_not_interact() -> None:
    torch.testing.assert_close(jis(jacobian_norms(halves, torch.randn(4, 2, 3))), torch.ones(4))


def test_slots_that_share_every_pixel_alike_score_zero() -> None:
    torch.testing.assert_close(jis(torch.ones(3, 5, 7)), torch.zeros(3))


def test_the_score_of_a_small_image_by_hand() -> None:
    norms = torch.tensor([[[3.0, 1.0], [1.0, 1.0]]])  # shares ¾ and ½: mean ⅝
    assert jis(norms).item() == pytest.approx((5 / 8 - 1 / 2) / (1 - 1 / 2))


def test_permuted_and_rescaled_slots_score_alike() -> None:
    norms = torch.rand(3, 4, 9)
    torch.testing.assert_close(jis(5 * norms[:, [2, 0, 3, 1]]), jis(norms))


def test_pixels_that_depend_on_no_slot_do_not_count() -> None:
    norms = torch.rand(2, 3, 6)
    padded = torch.cat([norms, torch.zeros(2, 3, 4)], 2)
    torch.testing.assert_close(jis(padded), jis(norms))
    assert jis(torch.zeros(1, 3, 4)).isnan().all()


def test_one_slot_has_nothing_to_interact_with() -> None:
    with pytest.raises(ValueError, match="at least 2 slots"):
        jis(torch.ones(2, 1, 4))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("probes", [None, 2])
def test_an_additive_decoder_has_no_curvature_across_slots_at_all(kind: str, probes: int | None) -> None:
    decoder = AdditiveDecoder(3, 4, kind=kind, layers=2, width=8, octaves=3)  # type: ignore[arg-type]
    found = block_hessian(decoder, torch.randn(3, 3, 3), probes=probes)
    assert found.across == 0 and found.share == 0
    assert found.within > 0


def test_a_product_of_slots_is_curved_across_slots_only() -> None:
    found = block_hessian(product, torch.randn(2, 2, 3), probes=None)
    assert found.within == 0 and found.share == 1
    assert found.across == pytest.approx(6**0.5)  # 3 pixels, each with H_01 = H_10 = 1 at one pair of numbers


def test_a_linear_decoder_has_share_zero() -> None:
    assert block_hessian(lambda z: z.sum(1)[:, :, None], torch.randn(2, 3, 4), probes=1).share == 0


def test_the_square_across_slots_is_what_the_penalty_estimates() -> None:
    """Two slots of one number each: a random sign is all a direction can be, and squares do not see it."""
    z = torch.randn(4, 2, 1, dtype=torch.float64)

    def decoder(z: Tensor) -> Tensor:
        return torch.tanh(z.sum(1, keepdim=True) * torch.arange(1, 4))

    exact = block_hessian(decoder, z, probes=None).across ** 2
    assert exact == pytest.approx(interaction_penalty(decoder, z).item()) and exact > 0


def test_exact_blocks_are_those_of_the_whole_hessian() -> None:
    decoder, z = decoders.Bent().double(), decoders.slots(B=2, K=3)
    of_outputs = [
        torch.autograd.functional.hessian(lambda code, output=output: decoder(code[None])[0, output], code)
        for code in z
        for output in range(5)
    ]
    whole = torch.stack(of_outputs)  # [outputs of all images, K, d, K, d]
    expected = (whole.square().sum((0, 2, 4)) / len(z)).sqrt()
    torch.testing.assert_close(block_hessian(decoder, z, probes=None).norms, expected)


def test_the_share_is_free_of_scale() -> None:
    decoder, z = decoders.Reference().double(), decoders.slots(B=2, K=3)
    before = block_hessian(decoder, z, generator=torch.Generator().manual_seed(0))
    louder = block_hessian(lambda z: 7 * decoder(z), z, generator=torch.Generator().manual_seed(0))
    wider = block_hessian(lambda z: decoder(z / 3), 3 * z, generator=torch.Generator().manual_seed(0))
    assert 0 < before.share < 1
    assert louder.share == pytest.approx(before.share) == wider.share
    assert louder.across == pytest.approx(7 * before.across)
    assert wider.across == pytest.approx(before.across / 9)


def test_permuted_slots_have_permuted_blocks() -> None:
    decoder, z, order = decoders.Bent().double(), decoders.slots(B=2, K=3), [2, 0, 1]
    before, after = (block_hessian(decoder, slots, probes=None).norms for slots in (z, z[:, order]))
    torch.testing.assert_close(after, before[order][:, order])


def test_chunks_of_unequal_size_change_no_norm() -> None:
    decoder, z = decoders.Bent().double(), decoders.slots(B=5, K=2)
    whole, parts = (block_hessian(decoder, z, probes=None, chunk=chunk).norms for chunk in (5, 2))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(("shape", "probes"), [((0, 2, 3), 1), ((2, 3), 1), ((2, 2, 3), 0)])
def test_nothing_to_measure_is_refused(shape: tuple[int, ...], probes: int) -> None:
    with pytest.raises(ValueError, match="block_hessian"):
        block_hessian(product, torch.zeros(shape), probes=probes)
