"""Low-rank updates of frozen modules."""

import pytest
import torch
from torch import nn

from compgen_fast.models.lora import LowRankLinear, add_lora, merged
from compgen_fast.models.vit import ViT


@pytest.fixture
def vit() -> ViT:
    return ViT(16, 24, 4, layers=2, heads=3)


def stir(module: nn.Module) -> None:
    """A few training steps' worth of change in what may change."""
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.normal_()


def test_it_starts_as_the_very_same_map(vit: ViT) -> None:
    images = torch.randn(2, 3, 16, 16)
    before = vit(images)
    add_lora(vit, 2)
    assert torch.equal(vit(images), before)


def test_only_the_updates_of_projections_and_mlps_are_trained(vit: ViT) -> None:
    assert add_lora(vit, 2) == 2 * 2 * ((24 + 72) + (24 + 96) + (96 + 24))
    vit(torch.randn(2, 3, 16, 16)).pow(3).sum().backward()
    trained = {name for name, p in vit.named_parameters() if p.grad is not None}
    linears = ("attn.qkv", "mlp.fc1", "mlp.fc2")
    assert trained == {f"blocks.{n}.{linear}.lora_{x}" for n in (0, 1) for linear in linears for x in "ab"}


def test_both_factors_learn_after_the_first_step(vit: ViT) -> None:
    add_lora(vit, 2)
    stir(vit)
    vit(torch.randn(2, 3, 16, 16)).pow(3).sum().backward()
    assert all((p.grad != 0).any() for p in vit.parameters() if p.requires_grad)


def test_an_updated_layer_is_the_product_of_its_factors() -> None:
    base, x = nn.Linear(7, 5).double(), torch.randn(3, 7, dtype=torch.float64)
    layer = LowRankLinear.around(base, 2)
    stir(layer)
    assert layer.lora_a.dtype == torch.float64
    torch.testing.assert_close(layer(x), base(x) + x @ (layer.lora_b @ layer.lora_a).T)
    torch.testing.assert_close(layer.merged_weight(), base.weight + layer.lora_b @ layer.lora_a)


def test_merged_weights_are_those_of_a_plain_module_with_the_same_output(vit: ViT) -> None:
    names, images = set(vit.state_dict()), torch.randn(2, 3, 16, 16)
    add_lora(vit, 3)
    stir(vit)
    plain = ViT(16, 24, 4, layers=2, heads=3)
    plain.load_state_dict(merged(vit))
    assert set(merged(vit)) == names
    torch.testing.assert_close(plain(images), vit(images), atol=1e-4, rtol=1e-4)


def test_merging_leaves_the_module_as_it_is(vit: ViT) -> None:
    add_lora(vit, 3)
    stir(vit)
    before = {name: x.clone() for name, x in vit.state_dict().items()}
    merged(vit)
    assert all(torch.equal(x, before[name]) for name, x in vit.state_dict().items())


def test_other_layers_can_be_chosen(vit: ViT) -> None:
    add_lora(vit, 1, targets=["proj"])
    changed = {name for name, child in vit.named_modules() if isinstance(child, LowRankLinear)}
    assert changed == {"blocks.0.attn.proj", "blocks.1.attn.proj"}  # not the convolution of that name


def test_a_layer_without_bias_and_a_layer_alone_can_be_updated() -> None:
    layer = LowRankLinear.around(nn.Linear(4, 3, bias=False), 2)
    stir(layer)
    plain = nn.Linear(4, 3, bias=False)
    plain.load_state_dict(merged(layer))
    x = torch.randn(5, 4)
    torch.testing.assert_close(plain(x), layer(x))


def test_what_cannot_be_updated_is_refused(vit: ViT) -> None:
    for rank in (0, 25):
        with pytest.raises(ValueError, match=f"rank is {rank}; expected 1 to 24"):
            add_lora(vit, rank)
    with pytest.raises(ValueError, match="no linear layer is named query; the module's are named: fc1, fc2, proj, qkv"):
        add_lora(vit, 2, targets=["query"])
    assert all(p.requires_grad for p in vit.parameters())
    add_lora(vit, 2)
    with pytest.raises(ValueError, match="low-rank updates already"):
        add_lora(vit, 2)
