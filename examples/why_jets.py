"""Who writes the interaction penalty by hand gets wrong gradients, without a word.

    python examples/why_jets.py         # or another seed: python examples/why_jets.py 1

Two slots of one number each, so that the penalty R = 2 ‖∂²f/∂z₁∂z₂‖² draws nothing at random, in fp64, so that
rounding explains nothing. Torch's derivatives stand beside ours and beside central differences, which are made of
forward passes alone and trust nobody's rules of differentiation. Of all outputs, or weights, a line shows the one where
torch is furthest off, and by how much, as a share of the largest number among them.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from compgen_fast.jets import Jet, interaction_penalty

Moved = Callable[[Tensor, Tensor], Tensor]  # f(s, t), the output when slot 1 has moved by s and slot 2 by t
ZERO, ONE = torch.tensor([0.0, 1.0], dtype=torch.float64)
STEP = 1e-3 * ONE
SIGNS = torch.tensor([[1.0, -1, 1, -1], [1, 1, -1, -1]], dtype=torch.float64)  # which way each slot moves, by sample


class Transformer(nn.Module):
    """Torch's own layer: pixels look at slots."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.slots = nn.Parameter(torch.randn(4, 8)), nn.Linear(1, 8)
        self.layer = nn.TransformerDecoderLayer(8, 2, 8, dropout=0, activation="gelu", batch_first=True)

    def forward(self, z: Tensor) -> Tensor:
        return self.layer(self.queries.expand(len(z), -1, -1), self.slots(z))


def mlp(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 8), norm, nn.Linear(8, 6))


def forward_twice(f: Moved) -> Tensor:
    return jvp(lambda t: jvp(lambda s: f(s, t), (ZERO,), (ONE,))[1], (ZERO,), (ONE,))[1]


def backward_twice(f: Moved) -> Tensor:
    return jacrev(jacrev(f, 0), 1)(ZERO, ZERO)


@torch.no_grad()
def difference(f: Moved) -> Tensor:
    return (f(STEP, STEP) - f(STEP, -STEP) - f(-STEP, STEP) + f(-STEP, -STEP)) / (4 * STEP**2)


def penalty(mixed: Tensor) -> Tensor:
    return 2 * mixed.square().sum() / len(mixed)


def slopes(decoder: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, tuple(decoder.parameters()), materialize_grads=True)
    return torch.cat([slope.flatten() for slope in found])


def difference_of_penalties(decoder: nn.Module, f: Moved) -> Tensor:
    weights = parameters_to_vector(decoder.parameters()).detach()

    def penalty_at(moved: Tensor) -> Tensor:
        vector_to_parameters(moved, decoder.parameters())
        return penalty(difference(f))

    moves = STEP * torch.eye(len(weights), dtype=weights.dtype)
    return torch.stack([penalty_at(weights + move) - penalty_at(weights - move) for move in moves]) / (2 * STEP)


def show(what: str, by_torch: Tensor, true: Tensor, ours: Tensor | None) -> None:
    wrong = (by_torch - true).abs()
    at = wrong.argmax()
    numbers = ["refused" if of is None else f"{of.flatten()[at]:.4g}" for of in (by_torch, true, ours)]
    print(f"  {what:34}{numbers[0]:>10}{numbers[1]:>12}{numbers[2]:>10}{wrong.max() / true.abs().max():>9.0%}")


def compare(name: str, decoder: nn.Module, refused: bool = False) -> None:
    """``refused``: jets refuse a decoder in which the samples of a batch see each other."""
    print(name)
    decoder, z = decoder.double(), torch.randn(4, 2, 1, dtype=torch.float64)
    u, v = torch.diag_embed(SIGNS.T).movedim(1, 0)[..., None]  # slot 1 moves along u, slot 2 along v

    def f(s: Tensor, t: Tensor) -> Tensor:
        return decoder(z + s * u + t * v)

    true, ours = difference(f), None if refused else decoder(Jet(torch.stack([z, u, v]))).channels[3]
    show("second derivative, forward twice", forward_twice(f), true, ours)
    show("second derivative, backward twice", backward_twice(f), true, ours)
    by_torch = slopes(decoder, penalty(backward_twice(f)))
    ours = None if refused else slopes(decoder, interaction_penalty(decoder, z))
    show("slope of its penalty in a weight", by_torch, difference_of_penalties(decoder, f), ours)


if __name__ == "__main__":
    torch.manual_seed(int(*sys.argv[1:]))
    print(f"{'':36}{'torch':>10}{'difference':>12}{'ours':>10}{'off by':>9}")
    with sdpa_kernel(SDPBackend.MATH):  # the other backends have no second derivative, and say so
        compare("nn.Linear, nn.LayerNorm, nn.Linear", mlp(nn.LayerNorm(8)))
        compare("nn.TransformerDecoderLayer", Transformer())
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        compare("nn.Linear, nn.BatchNorm1d in training, nn.Linear", mlp(norm), refused=True)
