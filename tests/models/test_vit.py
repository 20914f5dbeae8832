"""The Vision Transformer."""

import pytest
import torch
from torch import Tensor

from compgen_fast.models.vit import Normalise, ViT, ViTVariant

SMALL = {"image_size": 16, "width": 12, "patch": 4, "layers": 2, "heads": 3}
DINOV2 = ViTVariant(class_token=True, registers=4, layer_scale=1e-5)
CLIP = ViTVariant(class_token=True, prefix_positions=True, norm_pre=True, patch_bias=False, activation="quick_gelu")
VARIANTS = {"plain": ViTVariant(), "dinov2": DINOV2, "clip": CLIP}


@pytest.fixture(params=VARIANTS)
def vit(request: pytest.FixtureRequest) -> ViT:
    return ViT(**SMALL, variant=VARIANTS[request.param])


def test_patch_tokens_come_out_and_nothing_else(vit: ViT) -> None:
    assert vit(torch.randn(2, 3, 16, 16)).shape == (2, 16, 12)


def test_tokens_come_out_normed(vit: ViT) -> None:
    tokens = vit(torch.randn(2, 3, 16, 16))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 16), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.var(-1, correction=0), torch.ones(2, 16), atol=1e-3, rtol=0)


def test_a_patch_is_embedded_by_itself_and_in_reading_order(vit: ViT) -> None:
    images = torch.randn(2, 3, 16, 16)
    other = images.clone()
    other[:, :, 4:8, 8:12] += 1  # the patch in row 1, column 2
    moved = (vit.embed(other) != vit.embed(images)).any(-1)[:, vit.variant.prefix :]
    assert moved[:, 6].all() and moved.sum() == 2


def test_attention_mixes_what_the_embedding_kept_apart(vit: ViT) -> None:
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    other = images.clone()
    other[:, :, :4, :4] += 1
    vit.double()  # fp32 does not see a step through two fresh layer scales
    assert (vit(other) != vit(images)).any(-1).all()


def test_prefix_tokens_take_part_in_the_attention() -> None:
    vit, images = ViT(**SMALL, variant=ViTVariant(class_token=True, registers=2)), torch.randn(1, 3, 16, 16)
    before = vit(images)
    for token in (vit.cls_token, vit.reg_token):
        with torch.no_grad():
            token.normal_()
        after = vit(images)
        assert not torch.allclose(before, after)
        before = after


def test_positions_of_prefix_tokens_are_used_where_they_exist() -> None:
    for variant, positions in ((ViTVariant(class_token=True), 16), (CLIP, 17)):
        vit = ViT(**SMALL, variant=variant)
        assert vit.pos_embed.shape == (1, positions, 12)
        tokens = vit.embed(torch.zeros(1, 3, 16, 16))
        first = vit.cls_token[0, 0] + (vit.pos_embed[0, 0] if positions == 17 else 0)
        torch.testing.assert_close(tokens[0, 0], first)


def test_the_class_token_comes_before_the_registers() -> None:
    vit = ViT(**SMALL, variant=ViTVariant(class_token=True, registers=2, prefix_positions=True))
    prefix = torch.cat([vit.cls_token, vit.reg_token], 1) + vit.pos_embed[:, :3]
    torch.testing.assert_close(vit.embed(torch.zeros(1, 3, 16, 16))[:, :3], prefix)


def gradients(vit: ViT, images: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(vit(images).pow(3).sum(), list(vit.parameters())))


def test_recomputing_blocks_gives_the_very_same_gradients(vit: ViT) -> None:
    images = torch.randn(2, 3, 16, 16)
    plain = gradients(vit, images)
    vit.checkpoint = True
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(vit, images), strict=True))


def test_recomputing_blocks_keeps_fewer_activations() -> None:
    def kept(checkpoint: bool) -> int:
        sizes = []
        vit = ViT(16, 12, 4, layers=6, heads=3, checkpoint=checkpoint)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
            vit(torch.randn(2, 3, 16, 16))
        return sum(sizes)

    assert kept(True) < kept(False) / 4


def test_every_parameter_is_trained(vit: ViT) -> None:
    assert all((gradient != 0).any() for gradient in gradients(vit, torch.randn(2, 3, 16, 16)))


def test_it_runs_in_double_precision_and_under_autocast(vit: ViT) -> None:
    images = torch.randn(2, 3, 16, 16)
    exact = vit(images)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(vit(images).float(), exact, atol=0.1, rtol=0.1)
    double = vit.double()(images.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), exact, atol=1e-5, rtol=1e-4)


def test_the_defaults_are_a_vit_small() -> None:
    with torch.device("meta"):
        vit = ViT(224)
    names = dict(vit.named_parameters())
    assert names["patch_embed.proj.weight"].shape == (384, 3, 16, 16) and names["pos_embed"].shape == (1, 196, 384)
    assert names["blocks.11.attn.qkv.weight"].shape == (1152, 384)
    assert names["blocks.11.mlp.fc1.weight"].shape == (1536, 384)
    assert sum(p.numel() for p in vit.parameters()) == 12 * (12 * 384**2 + 13 * 384) + 384 * (768 + 1 + 196 + 2)


def test_pixels_are_normalised_per_colour() -> None:
    mean, std, pixels = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0), torch.rand(2, 3, 4, 4)
    expected = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    normalise = Normalise(mean, std)
    torch.testing.assert_close(normalise(2 * pixels - 1), expected)
    assert not normalise.state_dict()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"image_size": 18}, "image_size 18 is not a multiple of the patch, 4 pixels; resize the images: 16 or 20"),
        ({"patch": 32}, "image_size 16 is not a multiple of the patch, 32"),
        ({"patch": 0}, "the patch, 0 pixels"),
        ({"heads": 5}, "width 12 cannot be split into 5 heads"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ViT(**(SMALL | change))


def test_images_of_another_size_are_refused(vit: ViT) -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 32, 32\]; expected \[B, 3, 16, 16\]"):
        vit(torch.randn(2, 3, 32, 32))
