"""Which slots interact: the norm of every block of the Hessian, as a matrix and as a picture."""

from pathlib import Path

import torch
from torch import Tensor

from compgen_fast.jets.jet import Jet
from compgen_fast.jets.penalty import Decoder, check_slots, uncompiled


@torch.compiler.disable
@torch.no_grad()
def slot_hessian_norms(
    decoder: Decoder, z: Tensor, *, probes: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The norms ‖H_kl‖ [K, K] of the Hessian's slot blocks, root mean square over the batch.

    Args:
        decoder: as in :func:`interaction_penalty`.
        z: slots [B, K, …]. The diagonal holds the curvature within each slot.
        probes: None for the exact norms, by one jet per pair of coordinates: K²d²/2 of them, for small codes. A number
            estimates the squared norms without bias from that many random directions, by K²/2 jets each.
        generator: source of the directions, on z's device.
    """
    check_slots("slot_hessian_norms", z)
    decoder = uncompiled(decoder)
    slots, width = z.shape[1], z[0, 0].numel()
    squares = z.new_zeros(slots, slots)
    for k in range(slots):
        for l in range(k, slots):  # noqa: E741
            if probes is None:
                terms = [_square(decoder, z, k, l, a, b) for a in _units(z, width) for b in _units(z, width)]
                squares[k, l] = torch.stack(terms).sum()
            else:
                terms = [_square(decoder, z, k, l, *_signs(z, generator)) for _ in range(probes)]
                squares[k, l] = torch.stack(terms).mean()
            squares[l, k] = squares[k, l]
    return squares.sqrt()


def _units(z: Tensor, width: int) -> Tensor:
    """Every unit direction of one slot's code, [d, 1, …]."""
    return torch.eye(width, dtype=z.dtype, device=z.device).view(width, 1, *z.shape[2:])


def _signs(z: Tensor, generator: torch.Generator | None) -> Tensor:
    coins = torch.randint(0, 2, (2, *z[:, 0].shape), generator=generator, device=z.device)
    return (2 * coins - 1).to(z.dtype)


def _square(decoder: Decoder, z: Tensor, k: int, l: int, a: Tensor, b: Tensor) -> Tensor:  # noqa: E741
    """‖D²f[a on slot k, b on slot l]‖², mean over the batch."""
    u, v = torch.zeros_like(z), torch.zeros_like(z)
    u[:, k], v[:, l] = a, b
    output = decoder(Jet(torch.stack([z, u, v])))
    if not isinstance(output, Jet) or len(output.channels) == 3:
        return z.new_zeros(())
    return output.channels[3].square().sum() / len(z)


def plot_slot_hessian_norms(matrix: Tensor, path: str | Path) -> None:
    """Draws the matrix of :func:`slot_hessian_norms` with its numbers; the format follows the file name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 4.0), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix.cpu().numpy(), cmap="viridis", vmin=0)
    middle = float(matrix.max()) / 2
    for row, line in enumerate(matrix.tolist()):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:.2g}", ha="center", va="center", color="w" if value < middle else "k")
    axes.set(
        xlabel="slot", ylabel="slot", title="‖D²f / dz_k dz_l‖", xticks=range(len(matrix)), yticks=range(len(matrix))
    )
    figure.colorbar(image, ax=axes)
    figure.savefig(path)
