"""Which latents draw this image? A decoder, an image, and a search from several guesses.

    python examples/invert_an_image.py

The decoder paints one soft disc per slot, told by six numbers: its place, its size and its colour. Yours may be any
function of slots that torch can differentiate.
"""

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from compgen_fast.invert import search

SIZE, SLOTS, GUESSES = 32, 2, 16
PLACES = torch.cartesian_prod(torch.linspace(0, 1, SIZE), torch.linspace(0, 1, SIZE)).flip(1)  # (x, y), row by row


def discs(z: Tensor, pixels: Tensor | None = None) -> Tensor:
    """Slots [B, K, 6] → colours [B, N, 3] in [0, 1], of all pixels or of those asked for."""
    at, size, colour = z.sigmoid().split((2, 1, 3), dim=-1)
    places = PLACES if pixels is None else PLACES[pixels]
    away = (places - at[:, :, None]).norm(dim=-1)  # [B, K, N]
    inside = ((size / 2 - away) * 40).sigmoid()
    return torch.einsum("bkn,bkc->bnc", inside, colour).clamp(0, 1)


def picture() -> Tensor:
    """uint8 [1, H, W, 3]: two discs on black, which the decoder did not draw."""
    image = Image.new("RGB", (SIZE, SIZE))
    brush = ImageDraw.Draw(image)
    brush.ellipse((4, 5, 14, 15), fill="orange")
    brush.ellipse((17, 14, 29, 26), fill="royalblue")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, SIZE, SIZE, 3)


if __name__ == "__main__":
    guesses = torch.randn(1, GUESSES, SLOTS, 6, generator=torch.Generator().manual_seed(0))
    found = search(discs, picture(), guesses, steps=200)
    print(f"squared error {found.start_error.item():.5f} → {found.error.item():.5f}, from guess {found.restart.item()}")
    for x, y, size, *colour in found.z[0].sigmoid().tolist():
        rgb = ", ".join(f"{255 * part:.0f}" for part in colour)
        print(f"a disc of radius {size / 2 * SIZE:.1f} at ({x * SIZE:.1f}, {y * SIZE:.1f}), colour ({rgb})")
