"""Averaged weights: the formula, the swap, and the way through a checkpoint."""

import pytest
import torch
from torch import nn

from compgen_fast.train.ema import Ema


def model(width: int = 4) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    net[0].bias.requires_grad_(False)
    return net


def drift(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))


def averaged(ema: Ema, net: nn.Module) -> dict[str, torch.Tensor]:
    with ema.applied(net):
        return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_average_follows_the_formula(decay: float) -> None:
    net = model()
    ema = Ema(net, decay)
    expected = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
    for t in range(30):
        drift(net)
        ema.update(net)
        kept = min(decay, (1 + t) / (10 + t))
        expected = {name: kept * expected[name] + (1 - kept) * p.detach() for name, p in net.named_parameters()}
    found = averaged(ema, net)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name].double(), expected[name], rtol=1e-5, atol=1e-5)
    assert ema.updates == 30


def test_without_memory_the_average_is_the_last_weights() -> None:
    net = model()
    ema = Ema(net, 0.0)
    drift(net)
    ema.update(net)
    assert all(torch.equal(averaged(ema, net)[name], tensor) for name, tensor in net.state_dict().items())


def test_the_average_starts_as_a_copy_and_moves_only_when_told() -> None:
    net = model()
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    ema = Ema(net, 0.9)
    drift(net)
    found = averaged(ema, net)
    assert torch.equal(found["0.weight"], start["0.weight"]) and not torch.equal(found["0.bias"], start["0.bias"])


@pytest.mark.parametrize("fails", [False, True])
def test_weights_come_back_exactly_also_after_an_error(fails: bool) -> None:
    net = model()
    ema = Ema(net, 0.9)
    drift(net)
    ema.update(net)
    drift(net)
    before = {name: (parameter.data_ptr(), parameter.detach().clone()) for name, parameter in net.named_parameters()}
    try:
        with ema.applied(net):
            assert not torch.equal(net[0].weight, before["0.weight"][1])  # type: ignore[index]
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    for name, parameter in net.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])


def test_looking_at_the_average_does_not_change_it() -> None:
    net = model()
    ema = Ema(net, 0.9)
    drift(net)
    ema.update(net)
    once = averaged(ema, net)
    drift(net)
    twice = averaged(ema, net)
    assert torch.equal(once["0.weight"], twice["0.weight"])


def test_the_average_survives_a_checkpoint() -> None:
    net = model()
    ema, other = Ema(net, 0.9), Ema(model(), 0.9)
    for _ in range(3):
        drift(net)
        ema.update(net)
    other.load_state_dict({name: tensor.clone() for name, tensor in ema.state_dict().items()})
    drift(net)
    ema.update(net)
    other.update(net)
    one, two = averaged(ema, net), averaged(other, net)
    assert other.updates == 4 and all(torch.equal(one[name], two[name]) for name in one)


def test_the_average_of_another_model_is_refused_before_anything_changes() -> None:
    ema = Ema(model(), 0.9)
    before = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    wider = Ema(model(5), 0.9).state_dict()
    with pytest.raises(ValueError, match=r"0.weight is \[5, 3\] in the state and \[4, 3\] in the model"):
        ema.load_state_dict(wider)
    with pytest.raises(ValueError, match=r"updates is missing in the state"):
        ema.load_state_dict({name: tensor for name, tensor in before.items() if name != "updates"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in ema.state_dict().items())


def test_another_model_and_other_precisions_are_refused() -> None:
    net = model()
    ema = Ema(net, 0.9)
    net[2].bias.requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"2.bias is trained in only one"):
        ema.update(net)
    with pytest.raises(ValueError, match="bfloat16; expected float32"):
        Ema(model().bfloat16(), 0.9)
    with pytest.raises(ValueError, match="decay is 1"):
        Ema(model(), 1.0)
