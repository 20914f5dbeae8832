"""Many small models as one: what one computes and learns does not depend on the others."""

import pytest
import torch
from torch import nn

from compgen_fast.jets import Jet
from compgen_fast.models.stacked import StackedConv2d, StackedLinear

SEEDS = [3, 7, 11]


def layers(seeds):
    return {
        "linear": (StackedLinear(seeds, 0, 5, 4), (6, 5)),
        "convolution": (StackedConv2d(seeds, 1, 2, 3), (6, 2, 8, 8)),
        "doubled": (StackedConv2d(seeds, 2, 2, 3, kernel=4, up=2), (6, 2, 8, 8)),
        "four times": (StackedConv2d(seeds, 3, 2, 1, kernel=8, up=4), (6, 2, 5, 5)),
    }


def plain(stacked, model):
    """The same layer of one model, as torch has it."""
    weight, bias = stacked.weight[model].detach(), stacked.bias[model].detach()
    if isinstance(stacked, StackedLinear):
        made = nn.Linear(*weight.shape)
        weight, bias = weight.T, bias[0]
    elif stacked.up == 1:
        made = nn.Conv2d(weight.shape[1], len(bias), stacked.kernel, padding=1)
    else:
        padding = (stacked.kernel - stacked.up) // 2
        made = nn.ConvTranspose2d(len(weight), len(bias), stacked.kernel, stacked.up, padding)
    made.load_state_dict({"weight": weight, "bias": bias})
    return made


@pytest.mark.parametrize("kind", layers(SEEDS))
def test_each_model_of_a_stack_is_torch_s_own_layer(kind):
    stacked, shape = layers(SEEDS)[kind]
    x = torch.randn(len(SEEDS), *shape, generator=torch.Generator().manual_seed(0))
    made = stacked(x)
    for model in range(len(SEEDS)):
        torch.testing.assert_close(made[model], plain(stacked, model)(x[model]))
    if kind in ("doubled", "four times"):
        assert made.shape[-1] == stacked.up * shape[-1]


@pytest.mark.parametrize("kind", layers(SEEDS))
def test_a_model_has_the_same_weights_alone(kind):
    stacked, alone = layers(SEEDS)[kind][0], layers(SEEDS[1:2])[kind][0]
    assert torch.equal(stacked.weight[1], alone.weight[0]) and torch.equal(stacked.bias[1], alone.bias[0])
    assert not torch.equal(stacked.weight[0], stacked.weight[1])


@pytest.mark.parametrize("kind", layers(SEEDS))
def test_a_model_s_gradient_is_its_own(kind):
    stacked, shape = layers(SEEDS)[kind]
    x = torch.randn(len(SEEDS), *shape, generator=torch.Generator().manual_seed(0))
    stacked(x)[1].square().sum().backward()
    assert stacked.weight.grad[1].abs().max() > 0
    assert stacked.weight.grad[[0, 2]].abs().max() == 0


@pytest.mark.parametrize("kind", layers(SEEDS))
def test_jets_pass_through(kind):
    stacked, shape = layers(SEEDS)[kind]
    x, u = torch.randn(2, len(SEEDS), *shape, generator=torch.Generator().manual_seed(0))
    jet = stacked(Jet(torch.stack([x, u, torch.zeros_like(u)])))
    _, moved = torch.func.jvp(stacked, (x,), (u,))
    torch.testing.assert_close(jet.channels[1], moved)
