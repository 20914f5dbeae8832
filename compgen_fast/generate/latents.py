"""Tokens of images, made once by a trained tokenizer and kept as shards, so that generators never see a pixel.

The shards are ordinary ones: `cgf verify` and `cgf inspect` know them, and so does any WebDataset reader. What
they hold as a raw image uint8 [T, W, 3] is the bytes of the tokens: row t is token t, a code as three bytes, latents as
fp32 and then zeros up to a whole pixel. The name in the manifest says how to read them, and by which tokenizer they
were made: ``shapes2d-composition-train.latents-16x8-0f3a5c1b9e7d``. The factors travel along as always.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compgen_fast.models.config import TokenizerConfig, VQVAEConfig
from compgen_fast.models.tokenizer import VQVAE, Tokenizer
from compgen_fast.stream import Batch, Manifest, ShardStream, StreamError, pack
from compgen_fast.stream.remote import place
from compgen_fast.stream.shards import DataSet
from compgen_fast.worlds.source import Samples, Source

Kind = Literal["latents", "codes"]

_NAME = re.compile(r"(.*)\.(latents|codes)-(\d+)x(\d+)-([0-9a-f]{12})")
_CODE_BYTES = 3
assert sys.byteorder == "little", "tokens are kept as little-endian numbers, and read as this machine's"


@dataclass(frozen=True)
class Layout:
    """How the tokens of an image lie in the bytes of a stored one.

    kind: latents fp32 [T, size], or codes int64 [T] below ``size``.
    tokens: T.
    size: numbers of a token, or codes of the codebook.
    tokenizer: the `fingerprint` of what made them.
    """

    kind: Kind
    tokens: int
    size: int
    tokenizer: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, kind: Kind) -> Self:
        return replace(cls.of_config(tokenizer.config, kind), tokenizer=fingerprint(tokenizer))

    @classmethod
    def of_config(cls, config: TokenizerConfig, kind: Kind) -> Self:
        """Of a tokenizer with these settings, whichever its weights are."""
        tokens = (config.image_size // config.patch) ** 2
        if kind == "latents":
            return cls(kind, tokens, config.channels, "")
        if not isinstance(config, VQVAEConfig):
            raise ValueError("a VAE's tokens are numbers, it has no codes; expected a VQ-VAE, or kind 'latents'")
        return cls(kind, tokens, config.codes, "")

    @classmethod
    def read(cls, name: str) -> Self | None:
        """From the name of a data set; None where it holds no tokens."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        kind: Kind = "codes" if found[2] == "codes" else "latents"
        return cls(kind, int(found[3]), int(found[4]), found[5])

    def named(self, source: str) -> str:
        return f"{source}.{self.kind}-{self.tokens}x{self.size}-{self.tokenizer}"

    @property
    def bytes(self) -> int:
        """Of a token."""
        return _CODE_BYTES if self.kind == "codes" else 4 * self.size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a stored image."""
        return self.tokens, -(-self.bytes // 3), 3

    def pack(self, tokens: Tensor) -> NDArray[np.uint8]:
        """Latents fp32 [n, T, C] or codes int64 [n, T] → stored images uint8 [n, T, W, 3]."""
        if self.kind == "codes":
            rows = tokens.cpu()[..., None].contiguous().view(torch.uint8)[..., :_CODE_BYTES]
        else:
            rows = tokens.detach().float().cpu().contiguous().view(torch.uint8)
        stored = np.zeros((len(tokens), *self.shape), np.uint8)
        stored.reshape(len(tokens), self.tokens, -1)[..., : self.bytes] = rows.numpy()
        return stored

    def unpack(self, stored: Tensor) -> Tensor:
        """Stored images uint8 [n, T, W, 3] → latents fp32 [n, T, C] or codes int64 [n, T], on the same device."""
        if stored.dtype != torch.uint8 or stored.shape[1:] != self.shape:
            raise ValueError(
                f"stored tokens are {stored.dtype} {list(stored.shape)}; expected torch.uint8 "
                f"[n, {', '.join(map(str, self.shape))}], as `cache` wrote them"
            )
        rows = stored.flatten(2)[..., : self.bytes]
        if self.kind == "latents":
            return rows.contiguous().view(torch.float32)
        low, middle, high = rows.long().unbind(-1)
        return low + (middle << 8) + (high << 16)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Twelve hex digits that change with every weight, the codebook and the scale of latents."""
    digest = hashlib.sha256(repr(tokenizer.config).encode())
    for name, tensor in sorted(tokenizer.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


class Tokens:
    """A ``Source`` of stored tokens: those that a tokenizer gives for another source's images."""

    slots: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, source: Source, kind: Kind) -> None:
        self.tokenizer, self.source, self.layout = tokenizer, source, Layout.of(tokenizer, kind)
        self.name, self.factors = self.layout.named(source.name), tuple(source.factors)

    def __len__(self) -> int:
        return len(self.source)

    @torch.no_grad()
    def samples(self, indices: NDArray[np.int64]) -> Samples:
        found = self.source.samples(indices)
        images = torch.from_numpy(np.ascontiguousarray(found.images)).to(self.tokenizer.latent_mean.device)
        if self.layout.kind == "latents":
            return Samples(self.layout.pack(self.tokenizer.encode(images)), found.factors)
        assert isinstance(self.tokenizer, VQVAE)
        return Samples(self.layout.pack(self.tokenizer.codes(images)), found.factors)


class Packed:
    """A packed folder, or one at an address, as a ``Source`` by sample number; masks are left out."""

    slots: tuple[str, ...] = ()

    def __init__(self, folder: str | Path) -> None:
        self._data = DataSet(place(folder))
        self.name, self.factors = self._data.manifest.name, self._data.manifest.schema.factors

    def __len__(self) -> int:
        return self._data.samples

    def samples(self, indices: NDArray[np.int64]) -> Samples:
        schema = self._data.manifest.schema
        images = np.empty((len(indices), schema.height, schema.width, 3), np.uint8)
        found = self._data.fill(indices.tolist(), images)
        if found.faults:
            raise StreamError(f"{self.name} has a bad sample ({found.faults[0]}); repair it by packing it again")
        return Samples(images, found.factors)


def cache(
    tokenizer: Tokenizer,
    source: Source | str | Path,
    folder: str | Path,
    *,
    kind: Kind,
    split: str = "",
    progress: bool = False,
) -> Manifest:
    """Packs the tokens of all images of a source, or of a packed folder, into the shards of another folder.

    Args:
        tokenizer: trained; in evaluation, on any device.
        source: a world's part, an adapter's view, or a folder made by `cgf pack`.
        folder: where to. An unfinished cache of the same tokenizer and source in it is completed; one of another
            tokenizer is refused.
        kind: ``"latents"`` [T, C] fp32 of unit variance, or a VQVAE's ``"codes"`` [T], which it turns into the same
            latents by `embed`.
        split: recorded in the manifest, for people.
        progress: show a bar.
    """
    images = Packed(source) if isinstance(source, str | Path) else source
    return pack(Tokens(tokenizer, images, kind), folder, format="raw", split=split, progress=progress)


def layout_at(folder: str | Path) -> Layout | None:
    """Of the tokens that a packed folder holds, or one at an address; None where it holds images."""
    return Layout.read(DataSet(place(folder)).manifest.name)


def check_maker(layout: Layout, tokenizer: Tokenizer, origin: str) -> None:
    """Refuses tokens from ``origin`` that another tokenizer made, which this one would decode to something else."""
    if fingerprint(tokenizer) != layout.tokenizer:
        raise StreamError(
            f"{origin} was made by the tokenizer {layout.tokenizer}, and this one is {fingerprint(tokenizer)}; cache "
            "the tokens again, or load the weights that made them"
        )


class TokenStream(ShardStream):
    """A `ShardStream` over what `cache` wrote: the same arguments, order and state, but the ``images`` of a batch are
    tokens, latents fp32 [b, T, C] or codes int64 [b, T].
    """

    def __init__(self, data: str | Path, **options: Any) -> None:
        super().__init__(data, **options)
        name = self._sets[0].manifest.name
        layout = Layout.read(name)
        if layout is None:
            raise StreamError(f"{data} holds {name}, which are images; expected tokens, as `latents.cache` writes them")
        self.layout = layout

    def check(self, tokenizer: Tokenizer) -> None:
        """Refuses tokens that another tokenizer made, which this one would decode to something else."""
        check_maker(self.layout, tokenizer, self._sets[0].place.origin)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield replace(batch, images=self.layout.unpack(batch.images))
