"""Who writes the interaction penalty by hand gets wrong gradients, without a word.

    python examples/why_jets.py

Two slots of one number each, so that nothing is drawn at random, in fp64, so that rounding explains nothing. Of all
outputs, or weights, a line shows the one on which torch and we agree least. There a central difference decides, which
is made of forward passes alone. docs/jets.md says what goes wrong in torch.
"""

import torch
from torch import nn
from torch.func import jacrev, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from compgen_fast.jets import Jet, interaction_penalty

torch.manual_seed(0)
ZERO, ONE, STEP = torch.tensor([0, 1, 1e-3]).double()
z = torch.randn(4, 2, 1).double()
u, v = torch.eye(2).double()[:, None, :, None].expand(2, *z.shape)  # slot 1 moves by u, slot 2 by v


class Transformer(nn.TransformerDecoderLayer):
    def __init__(self):
        super().__init__(8, nhead=2, dim_feedforward=8, dropout=0, activation="gelu", batch_first=True)
        self.pixels, self.slots = nn.Parameter(torch.randn(4, 8)), nn.Linear(1, 8)

    def forward(self, z):
        return super().forward(self.pixels.expand(len(z), -1, -1), self.slots(z))


def corners(f):
    return (f(STEP, STEP) - f(STEP, -STEP) - f(-STEP, STEP) + f(-STEP, -STEP)) / (4 * STEP**2)


def penalty(mixed):  # Σ ‖∂²f/∂z_k∂z_l‖² over k ≠ l
    return 2 * mixed.square().sum() / len(mixed)


def show(what, by_torch, ours, difference):
    at = (by_torch - ours).abs().argmax()
    print(f"  {what:30}{by_torch.flatten()[at]:10.4g}{difference(at):12.4g}{ours.flatten()[at]:10.4g}")


def compare(name, decoder, weight):
    print(f"{name:32}{'torch':>10}{'difference':>12}{'ours':>10}")
    f = lambda s, t: decoder(z + s * u + t * v)  # noqa: E731

    forward_twice = jvp(lambda t: jvp(lambda s: f(s, t), (ZERO,), (ONE,))[1], (ZERO,), (ONE,))[1]
    by_jets = decoder(Jet(torch.stack([z, u, v]))).channels[3]
    show("∂²f/∂z₁∂z₂, jvp of jvp", forward_twice, by_jets, lambda at: corners(f).flatten()[at])

    def moved(at, by):
        weight.data.view(-1)[at] += by
        return penalty(corners(f)).item()

    by_torch = torch.autograd.grad(penalty(jacrev(jacrev(f, 0), 1)(ZERO, ZERO)), weight)[0]
    by_jets = torch.autograd.grad(interaction_penalty(decoder, z), weight)[0]
    show("slope of the penalty", by_torch, by_jets, lambda at: (moved(at, STEP) - moved(at, -2 * STEP)) / (2 * STEP))


with sdpa_kernel(SDPBackend.MATH):  # torch's other attentions have no second derivative, and say so
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 6)).double()
    transformer = Transformer().double()
    compare("nn.LayerNorm in an MLP", mlp, mlp[1].weight)
    compare("nn.TransformerDecoderLayer", transformer, transformer.norm1.weight)
