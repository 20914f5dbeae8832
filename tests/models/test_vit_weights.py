"""ViTs from files of weights: synthetic files of every family, against a forward pass written out here."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, layer_norm

from compgen_fast.models.lora import add_lora, merged
from compgen_fast.models.vit_weights import describe, load_vit, read_tensors

WIDTH, HIDDEN, PATCH, GRID, LAYERS = 128, 160, 4, 3, 2
SIZE = PATCH * GRID
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Family:
    """What a published family has in its files, and what is known about it beside."""

    file: str = "vit_small.safetensors"
    tokens: dict[str, int] = field(default_factory=dict)
    """How many class and register tokens, by name, in their order."""
    positions: int = GRID**2
    extras: tuple[str, ...] = ()
    patch_bias: bool = True
    pixels: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    gelu: str = "erf"
    eps: float = 1e-6


FAMILIES = {
    "dino": Family(tokens={"cls_token": 1}, positions=GRID**2 + 1),
    "dinov2": Family(tokens={"cls_token": 1}, positions=GRID**2 + 1, extras=("ls", "mask_token")),
    "dinov2 with registers": Family(tokens={"cls_token": 1, "reg_token": 4}, extras=("ls",)),
    "openai clip": Family(
        "vit_base_patch16_clip_quickgelu_224.pt",
        {"cls_token": 1},
        GRID**2 + 1,
        ("norm_pre", "head"),
        False,
        CLIP,
        "quick",
        1e-5,
    ),
    "open clip": Family(
        "vit_base_patch16_clip_224.pt", {"cls_token": 1}, GRID**2 + 1, ("norm_pre",), False, CLIP, "erf", 1e-5
    ),
    "siglip 2": Family(extras=("attn_pool", "head"), pixels=HALVES, gelu="tanh"),
    "ijepa": Family("IN1K-vit.h.14-300e.pth"),
}


def synthetic(family: Family) -> dict[str, Tensor]:
    """Random weights with the names of timm's vision_transformer."""
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH)}
    if family.patch_bias:
        shapes["patch_embed.proj.bias"] = (WIDTH,)
    shapes |= {name: (1, count, WIDTH) for name, count in family.tokens.items()}
    shapes["pos_embed"] = (1, family.positions, WIDTH)
    vectors = ["norm", *(["norm_pre"] if "norm_pre" in family.extras else [])]
    for block in (f"blocks.{n}" for n in range(LAYERS)):
        vectors += [f"{block}.norm1", f"{block}.norm2"]
        for name, out, inside in (
            ("attn.qkv", 3 * WIDTH, WIDTH),
            ("attn.proj", WIDTH, WIDTH),
            ("mlp.fc1", HIDDEN, WIDTH),
            ("mlp.fc2", WIDTH, HIDDEN),
        ):
            shapes |= {f"{block}.{name}.weight": (out, inside), f"{block}.{name}.bias": (out,)}
        if "ls" in family.extras:
            shapes |= {f"{block}.ls{n}.gamma": (WIDTH,) for n in (1, 2)}
    shapes |= {f"{name}.{part}": (WIDTH,) for name in vectors for part in ("weight", "bias")}
    unused = {"head": "head.weight", "attn_pool": "attn_pool.latent", "mask_token": "mask_token"}
    shapes |= {name: (1, WIDTH) for extra, name in unused.items() if extra in family.extras}
    return {name: torch.randn(shape) * (0.1 if len(shape) > 1 else 1) for name, shape in shapes.items()}


def naive(w: dict[str, Tensor], family: Family, images: Tensor) -> Tensor:
    """Patch tokens of images in [−1, 1], in fp64, step by step."""
    w = {name: x.double() for name, x in w.items()}

    def normed(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], family.eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        if family.gelu == "quick":
            return x * torch.sigmoid(1.702 * x)
        inner = torch.erf(x / math.sqrt(2))
        return x / 2 * (1 + (inner if family.gelu == "erf" else torch.tanh(0.7978845608 * (x + 0.044715 * x**3))))

    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in family.pixels)
    patches = conv2d(
        ((images.double() + 1) / 2 - mean) / std, w["patch_embed.proj.weight"], w.get("patch_embed.proj.bias"), PATCH
    )
    x = patches.flatten(2).transpose(1, 2)
    tokens = [w[name].expand(len(x), -1, -1) for name in family.tokens]
    if family.positions == GRID**2:
        x = torch.cat([*tokens, x + w["pos_embed"]], 1)
    else:
        x = torch.cat([*tokens, x], 1) + w["pos_embed"]
    x = normed(x, "norm_pre") if "norm_pre" in family.extras else x
    for block in (f"blocks.{n}" for n in range(LAYERS)):
        q, k, v = linear(normed(x, f"{block}.norm1"), f"{block}.attn.qkv").chunk(3, -1)
        heads = [
            (a @ b.transpose(1, 2) / 8).softmax(-1) @ c
            for a, b, c in zip(q.split(64, -1), k.split(64, -1), v.split(64, -1), strict=True)
        ]
        x = x + w.get(f"{block}.ls1.gamma", 1) * linear(torch.cat(heads, -1), f"{block}.attn.proj")
        hidden = gelu(linear(normed(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + w.get(f"{block}.ls2.gamma", 1) * linear(hidden, f"{block}.mlp.fc2")
    return normed(x[:, sum(family.tokens.values()) :], "norm")


def save(folder: Path, family: Family, tensors: dict[str, Tensor]) -> Path:
    path = folder / family.file
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_every_family_gives_its_patch_tokens(name: str, tmp_path: Path) -> None:
    family, images = FAMILIES[name], torch.rand(2, 3, SIZE, SIZE) * 2 - 1
    weights = synthetic(family)
    vit = load_vit(save(tmp_path, family, weights), SIZE)
    expected = naive(weights, family, images)
    torch.testing.assert_close(vit.double()(images.double()), expected, atol=1e-5, rtol=1e-5)


def test_sizes_are_read_off_the_tensors(tmp_path: Path) -> None:
    family = FAMILIES["dinov2 with registers"]
    path = save(tmp_path, family, synthetic(family))
    info = describe(path, read_tensors(path))
    assert (info.image_size, info.width, info.patch, info.layers, info.heads) == (SIZE, WIDTH, PATCH, LAYERS, 2)
    assert info.variant.registers == 4 and not info.variant.prefix_positions and info.variant.ratio == HIDDEN / WIDTH


@pytest.mark.parametrize(("width", "heads"), [(384, 6), (768, 12), (1024, 16), (1152, 16), (1280, 16), (1408, 16)])
def test_heads_are_64_wide_and_at_most_16(width: int, heads: int, tmp_path: Path) -> None:
    """ViT-S, B and L; SigLIP's so400m, I-JEPA's H and g."""
    tensors = {
        "patch_embed.proj.weight": torch.zeros(width, 3, 1, 1),
        "pos_embed": torch.zeros(1, 4, width),
        "blocks.0.mlp.fc1.weight": torch.zeros(4 * width, width),
    }
    assert describe(tmp_path / "model.pt", tensors).heads == heads
    assert describe(tmp_path / "model.pt", tensors, heads=4).heads == 4


@pytest.mark.parametrize("name", ["dino", "dinov2 with registers", "siglip 2"])
def test_positions_are_interpolated_to_another_size(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    weights = synthetic(family)
    vit, prefix = load_vit(save(tmp_path, family, weights), 2 * SIZE), family.positions - GRID**2
    assert torch.equal(vit.pos_embed[:, :prefix], weights["pos_embed"][:, :prefix])
    for channel in (0, WIDTH - 1):
        old = weights["pos_embed"][0, prefix:, channel].view(1, 1, GRID, GRID)
        new = interpolate(old, scale_factor=2, mode="bicubic", antialias=True).flatten()
        torch.testing.assert_close(vit.pos_embed[0, prefix:, channel], new)
    assert vit(torch.zeros(1, 3, 2 * SIZE, 2 * SIZE)).shape == (1, 4 * GRID**2, WIDTH)


def test_a_smooth_field_of_positions_stays_where_it_was(tmp_path: Path) -> None:
    """Rows before columns: a ramp along the columns stays one."""
    family, grid = Family(positions=64), 8
    weights = synthetic(family) | {
        "pos_embed": torch.arange(grid).repeat(grid).view(1, -1, 1).expand(1, -1, WIDTH) / 8.0
    }
    vit = load_vit(save(tmp_path, family, {k: v.contiguous() for k, v in weights.items()}), 16 * PATCH)
    field = vit.pos_embed[0, :, 0].view(16, 16)
    assert (field.diff(dim=1) > 0).all() and (field.diff(dim=0).abs() < 1e-6).all()


def test_half_precision_files_become_single_precision(tmp_path: Path) -> None:
    family = FAMILIES["dino"]
    path = save(tmp_path, family, {name: x.half() for name, x in synthetic(family).items()})
    assert {p.dtype for p in load_vit(path, SIZE).parameters()} == {torch.float32}


def test_training_checkpoints_are_unwrapped(tmp_path: Path) -> None:
    family = FAMILIES["ijepa"]
    weights, path = synthetic(family), tmp_path / "checkpoint.pth"
    encoder = {f"module.{name}": x for name, x in weights.items()}
    torch.save({"encoder": encoder, "predictor": {"module.norm.weight": torch.ones(3)}, "epoch": 300}, path)
    assert set(read_tensors(path)) == set(weights)
    assert load_vit(path, SIZE).norm.weight.equal(weights["norm.weight"])


def test_old_files_without_a_zip_can_be_read(tmp_path: Path) -> None:
    weights = synthetic(FAMILIES["dino"])
    torch.save(weights, tmp_path / "dino.pth", _use_new_zipfile_serialization=False)
    assert set(read_tensors(tmp_path / "dino.pth")) == set(weights)


def test_the_hubs_configuration_beside_the_file_is_believed(tmp_path: Path) -> None:
    family = FAMILIES["open clip"]
    path = save(tmp_path, family, synthetic(family))
    assert describe(path, read_tensors(path)).variant.activation == "gelu"
    said = {
        "architecture": "vit_base_patch16_clip_quickgelu_224",
        "pretrained_cfg": {"mean": [0.1] * 3, "std": [2.0] * 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    info = describe(path, read_tensors(path))
    assert info.variant.activation == "quick_gelu" and info.mean == (0.1,) * 3 and info.std == (2.0,) * 3


def test_exported_weights_load_again_as_the_same_vit(tmp_path: Path) -> None:
    family, images = FAMILIES["dino"], torch.rand(1, 3, SIZE, SIZE)
    vit = load_vit(save(tmp_path, family, synthetic(family)), SIZE)
    add_lora(vit, 2)
    with torch.no_grad():
        for p in vit.parameters():
            p.add_(0.02 * torch.randn_like(p) * p.requires_grad)
    save_file(merged(vit), tmp_path / "tuned.safetensors")
    torch.testing.assert_close(
        load_vit(tmp_path / "tuned.safetensors", SIZE)(images), vit(images), atol=1e-4, rtol=1e-4
    )


def test_on_the_meta_device_nothing_is_copied(tmp_path: Path) -> None:
    path = save(tmp_path, FAMILIES["dino"], synthetic(FAMILIES["dino"]))
    with torch.device("meta"):
        assert all(p.is_meta for p in load_vit(path, 2 * SIZE).parameters())


def test_the_file_can_change_after_loading(tmp_path: Path) -> None:
    weights, path = synthetic(FAMILIES["dino"]), tmp_path / "model.pt"
    torch.save(weights, path)
    vit = load_vit(path, SIZE)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert vit.blocks[1].mlp.fc1.weight.equal(weights["blocks.1.mlp.fc1.weight"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"blocks.1.mlp.fc2.bias": None}, r"missing: blocks\.1\.mlp\.fc2\.bias"),
        ({"norm.weight": None, "norm.bias": None}, r"missing: norm\.weight, norm\.bias"),
        ({"blocks.0.attn.q_norm.weight": (64,)}, r"left over: blocks\.0\.attn\.q_norm\.weight"),
        ({"blocks.0.mlp.fc2.weight": (WIDTH, HIDDEN // 2)}, r"another shape: blocks.0.mlp.fc2.weight \[128, 80\]"),
        ({"pos_embed": (1, 7, WIDTH)}, "7 position embeddings and 1 class and register tokens"),
        ({"pos_embed": None}, "has no 'pos_embed' among its"),
        ({"patch_embed.proj.weight": (WIDTH, 48)}, r"patches have sizes \[48\]"),
        ({"patch_embed.proj.weight": (WIDTH, 1, PATCH, PATCH)}, r"patches have sizes \[1, 4, 4\]; expected 3 colours"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, tuple[int, ...] | None], sentence: str, tmp_path: Path) -> None:
    weights = synthetic(FAMILIES["dino"])
    for name, shape in change.items():
        if shape is None:
            del weights[name]
        else:
            weights[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=sentence):
        load_vit(save(tmp_path, FAMILIES["dino"], weights), SIZE)


def test_many_misfits_are_counted_rather_than_listed(tmp_path: Path) -> None:
    weights = synthetic(FAMILIES["dino"]) | {f"rope.{n}": torch.zeros(1) for n in range(10)}
    with pytest.raises(ValueError, match=r"left over: rope\.0, rope\.1, rope\.2, rope\.3 and 6 more"):
        load_vit(save(tmp_path, FAMILIES["dino"], weights), SIZE)


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        load_vit(tmp_path / "absent.pt", SIZE)
    for name in ("noise.pt", "noise.safetensors"):
        (tmp_path / name).write_bytes(b"not tensors at all")
        with pytest.raises(ValueError, match="cannot be read as a file of tensors"):
            load_vit(tmp_path / name, SIZE)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list; expected a state_dict"):
        load_vit(tmp_path / "list.pt", SIZE)
    torch.save({"model": torch.nn.Linear(1, 1)}, tmp_path / "module.pt")
    with pytest.raises(ValueError, match="save a state_dict"):  # a pickled module would run code
        load_vit(tmp_path / "module.pt", SIZE)


def test_a_width_that_does_not_tell_its_heads_asks_for_them(tmp_path: Path) -> None:
    tensors = {
        "patch_embed.proj.weight": torch.zeros(96, 3, 1, 1),
        "pos_embed": torch.zeros(1, 4, 96),
        "blocks.0.mlp.fc1.weight": torch.zeros(96, 96),
    }
    with pytest.raises(ValueError, match="96 wide, which does not tell the heads"):
        describe(tmp_path / "model.pt", tensors)
