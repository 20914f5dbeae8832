"""The readers that `cgf bench stream` compares: each an endless supply of batches of the same packed samples.

Every one of them shuffles, decodes to uint8 and gives the factors too, as training would want it. The two floors do
less on purpose: reading the tars' bytes, and decoding samples that are in memory already.
"""

import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from compgen_fast.stream import ShardStream, codecs
from compgen_fast.stream.manifest import Format
from compgen_fast.stream.remote import Local
from compgen_fast.stream.shards import DataSet

BATCH = 64
Batches = Iterator[Any]
Reader = Callable[[Path, Format, int], Batches]


def ours(folder: Path, format: Format, workers: int) -> Batches:
    return iter(ShardStream(folder, batch_size=BATCH, workers=workers))


def tar_bytes(folder: Path, format: Format, workers: int) -> Batches:
    """All bytes of all tars, a batch's worth at a time."""
    tars = sorted(folder.glob("*.tar"))
    data = DataSet(Local(folder))
    piece = BATCH * sum(tar.stat().st_size for tar in tars) // data.samples
    while True:
        for tar in tars:
            with tar.open("rb", buffering=0) as file:
                while content := file.read(piece):
                    yield content


def decode_only(folder: Path, format: Format, workers: int) -> Batches:
    """Every image decoded out of memory into one array, without reading, checking or ordering anything."""
    data = DataSet(Local(folder))
    encoded = [_encoded(data, sample) for sample in range(data.samples)]
    decode = codecs.DECODERS[format]
    out = np.empty((BATCH, data.manifest.schema.height, data.manifest.schema.width, 3), np.uint8)
    while True:
        for start in range(0, len(encoded) - BATCH + 1, BATCH):
            for row, content in enumerate(encoded[start : start + BATCH]):
                decode(content, out[row])
            yield out


def _encoded(data: DataSet, sample: int) -> bytes:
    shard, row = data.at(sample)
    return shard.encoded(shard.place, row)


def webdataset_pil(folder: Path, format: Format, workers: int) -> Batches:
    """As webdataset's own documentation has it: decode with PIL, shuffle a buffer, batch, load with WebLoader."""
    webdataset: Any = import_module("webdataset")
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    ending = codecs.EXTENSIONS[format]
    samples = (
        webdataset.WebDataset(urls, shardshuffle=100, empty_check=False)
        .repeat()
        .shuffle(1000)
        .decode("rgb8")
        .to_tuple(ending, "json")
        .batched(BATCH)
    )
    return iter(webdataset.WebLoader(samples, batch_size=None, num_workers=workers))


def litdata(folder: Path, format: Format, workers: int) -> Batches:
    """The same encoded bytes in litdata's own chunks, decoded by the same codecs as ours."""
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
    lit: Any = import_module("litdata")
    chunks = folder.with_name(folder.name + ".litdata")
    if not chunks.exists():
        _write_litdata(folder, chunks, import_module("litdata.streaming.writer").BinaryWriter)
    data = lit.StreamingDataset(
        str(chunks), shuffle=True, transform=_Decode(format, DataSet(Local(folder)).manifest.schema)
    )
    loader = lit.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True)
    while True:
        yield from loader


def _write_litdata(folder: Path, chunks: Path, writer_class: Any) -> None:
    data = DataSet(Local(folder))
    chunks.mkdir()
    writer = writer_class(str(chunks), chunk_bytes=64 << 20)
    for sample in range(data.samples):
        shard, row = data.at(sample)
        _, *factors = shard.description(row)
        writer.add_item(sample, {"image": _encoded(data, sample), "factors": np.array(factors, np.float32)})
    writer.done()
    writer.merge()


class _Decode:
    def __init__(self, format: Format, schema: Any) -> None:
        self.format, self.shape = format, (schema.height, schema.width, 3)

    def __call__(self, sample: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        image = np.empty(self.shape, np.uint8)
        codecs.DECODERS[self.format](sample["image"], image)
        return {**sample, "image": image}


def mosaic(folder: Path, format: Format, workers: int) -> Batches:
    """mosaicml-streaming's MDS shards with the same encoded bytes, decoded by the same codecs as ours."""
    mds: Any = import_module("streaming")
    data = DataSet(Local(folder))
    chunks = folder.with_name(folder.name + ".mds")
    if not chunks.exists():
        with mds.MDSWriter(out=str(chunks), columns={"image": "bytes", "number": "int"}) as writer:
            for sample in range(data.samples):
                writer.write({"image": _encoded(data, sample), "number": sample})
    decode = _Decode(format, data.manifest.schema)

    class Decoded(mds.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return decode(super().__getitem__(at))

    loader: Any = DataLoader(Decoded(local=str(chunks), shuffle=True, batch_size=BATCH), BATCH, num_workers=workers)
    while True:
        yield from loader


PEERS: dict[str, Reader] = {"webdataset + PIL": webdataset_pil, "litdata": litdata, "mosaicml-streaming": mosaic}
_MODULES = {"webdataset + PIL": "webdataset", "litdata": "litdata", "mosaicml-streaming": "streaming"}


def missing(peer: str) -> str:
    """Why a peer cannot take part, or nothing."""
    if importlib.util.find_spec(_MODULES[peer]) is None:
        return f"{_MODULES[peer]} is not installed (with --no-deps, or it brings another torch)"
    return ""


def pil_image(content: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
