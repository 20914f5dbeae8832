"""What the page shows of a decoder: searches frame by frame, where they failed, and slots of two images together."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.invert import SlotMarginals
from compgen_fast.models.slot_vae import SlotVAE, as_bytes
from compgen_fast.studies.perception.plan import Job
from compgen_fast.train.data import part
from compgen_fast.worlds import Part

if TYPE_CHECKING:
    from compgen_fast.studies.perception.measuring import Images, Inferred

SHOWN, FAILED, FRAMES = 6, 4, 9
CHUNK = 64


class Composites(NamedTuple):
    """Slots of two training images, decoded together.

    shown: uint8 [m, 3, H, W, 3], the image that gave the scene, the one that gave the object, and the decode.
    error: mean squared error against what the world draws for those causes.
    """

    shown: NDArray[np.uint8]
    error: float


def of_search(
    job: Job,
    vae: SlotVAE,
    unseen: "Images",
    found: Mapping[str, Mapping[str, "Inferred"]],
    readouts: Mapping[str, Mapping[str, Any]],
) -> dict[str, NDArray[Any]]:
    """The arrays of pictures.npz of this decoder."""
    told = {name: readouts[name]["object_1"].predict(found[name]["ood"].z).numpy() for name in ("encoder", "search")}
    truth = unseen.values["object_1"]
    wrong = (told["search"] != truth).nonzero()[0]
    chosen = np.arange(min(SHOWN, len(truth)))
    failed = _extremes(wrong, found["search"]["ood"].error.numpy())
    marginals = SlotMarginals.fit(found["encoder"]["probe"].z)
    arrays = _frames(job, vae, unseen, marginals, chosen, told)
    if len(failed):
        below = _frames(job, vae, unseen, marginals, failed, told)
        arrays |= {f"failures/{name}": array for name, array in below.items()}
    return arrays


def _extremes(wrong: NDArray[np.int64], error: NDArray[np.float32]) -> NDArray[np.int64]:
    """Of images read wrong: those with the lowest error, then those with the highest."""
    by_error = wrong[error[wrong].argsort()]
    half = FAILED // 2
    return by_error if len(by_error) <= FAILED else np.concatenate([by_error[:half], by_error[-half:]])


@torch.no_grad()
def _frames(
    job: Job,
    vae: SlotVAE,
    images: "Images",
    marginals: SlotMarginals,
    chosen: NDArray[np.int64],
    told: Mapping[str, NDArray[np.int64]],
) -> dict[str, NDArray[Any]]:
    from compgen_fast.studies.perception.measuring import searched

    pixels = images.pixels[torch.from_numpy(chosen)]
    found = searched(job, vae, pixels, marginals, trace=True, paths=range(len(chosen)))
    assert found.paths is not None and found.trace is not None
    names = [factor for factor in part(job.train.data, job.train.model.image_size, "ood").factors if factor.values]
    values = {factor.name: factor.values or () for factor in names}
    split = job.train.data.split or "background"
    partner = {"background": "background", "texture": "texture_1", "object": "object_2"}[split]
    joint = {"background": " on ", "texture": " in ", "object": " beside "}[split]
    return {
        "images": pixels.numpy(),
        "path": _decoded(vae, found.paths, found.z, pixels.shape[1:]),
        "maps": _maps(vae, found.z, pixels.shape[1:3]),
        "labels": np.array(
            [
                values["object_1"][int(images.values["object_1"][number])]
                + joint
                + values[partner][int(images.values[partner][number])]
                for number in chosen
            ]
        ),
        "read": np.array(
            [[values["object_1"][int(told[way][number])] for way in ("encoder", "search")] for number in chosen]
        ),
        "errors": found.trace.float().numpy(),
    }


def _decoded(vae: SlotVAE, paths: Tensor, last: Tensor, shape: torch.Size) -> NDArray[np.uint8]:
    """Decodes along each path [n, T, …]; a search that ended early stays where it ended."""
    steps = np.linspace(0, paths.shape[1] - 1, FRAMES - 1).round().astype(int)
    frames = paths[:, steps]
    frames = torch.where(frames.isfinite(), frames, last[:, None])
    whole = torch.cat([frames, last[:, None]], 1)
    return as_bytes(_colours(vae, whole.flatten(0, 1))).view(*whole.shape[:2], *shape).numpy()


def _colours(vae: SlotVAE, z: Tensor) -> Tensor:
    """Decodes of latents on the CPU, on the CPU."""
    device = next(vae.parameters()).device
    return torch.cat([vae.decode(some.to(device)).cpu() for some in z.split(CHUNK)])


def _maps(vae: SlotVAE, z: Tensor, size: torch.Size) -> NDArray[np.float32]:
    """The share of each slot in each pixel: its masks, or where there are none how much the pixel moves with it."""
    z = z.to(next(vae.parameters()).device)
    masked: Any = getattr(vae.decoder, "decode_with_masks", None)
    if masked is not None:
        shares = masked(z)[1]
    else:
        from compgen_fast.measure import jacobian_norms

        norms = jacobian_norms(vae.decoder, z)
        shares = norms / norms.sum(1, keepdim=True).clamp_min(1e-12)
    maps: NDArray[np.float32] = shares.unflatten(2, size).float().cpu().numpy()
    return maps


@torch.no_grad()
def composites(job: Job, vae: SlotVAE, images: "Images", z: Tensor, things: Sequence[int], count: int) -> Composites:
    """Scenes of ``count`` training images with the objects of the next ones, whose slots are ``things``, beside what
    the world draws.
    """
    count = min(count, len(z) - 1)
    together = z[:count].clone()
    together[:, things] = z[1 : count + 1, things]
    decoded = _colours(vae, together)
    source = part(job.train.data, job.train.model.image_size, "train")
    assert isinstance(source, Part)
    of_things = ("object", "texture", "x", "y", "scale", "rotation", "hue")
    values = {
        name: value[1 : count + 1] if name.rsplit("_", 1)[0] in of_things and name[-1] in "12" else value[:count]
        for name, value in images.values.items()
    }
    wanted = torch.from_numpy(source.world.render(values).images).flatten(1, 2)
    error = (decoded - wanted / 255).square().mean().item()
    drawn = as_bytes(decoded[:SHOWN]).view(-1, *images.pixels.shape[1:])
    shown = torch.stack([images.pixels[: len(drawn)], images.pixels[1 : len(drawn) + 1], drawn], 1)
    return Composites(shown.numpy(), error)
