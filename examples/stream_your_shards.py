"""Images in a folder become shards, two ranks share every step, and a run that stopped goes on where it was.

python examples/stream_your_shards.py             # makes images of its own, in a folder that goes away
python examples/stream_your_shards.py PHOTOS      # your images and their factors.csv; packs them into PHOTOS.shards
"""

import csv
import sys
import tempfile
from pathlib import Path

from PIL import Image

from compgen_fast.stream import ShardStream, pack
from compgen_fast.worlds.adapters import open_folder

COLOURS = ("crimson", "gold", "navy", "teal")
BATCH = 16  # of all ranks together


def make_images(folder: Path) -> None:
    folder.mkdir()
    with open(folder / "factors.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["filename", "colour", "brightness"])
        for number in range(96):
            colour, brightness = COLOURS[number % 4], 0.5 + number / 192
            pixel = Image.new("RGB", (1, 1), colour).point(lambda value, by=brightness: round(by * value))
            pixel.resize((48, 40)).save(folder / f"{number:03}.png")
            table.writerow([f"{number:03}.png", colour, brightness])


def stream_shards(photos: Path, shards: Path) -> None:
    packed = pack(open_folder("images", photos, resolution=32), shards)
    names = ", ".join(factor.name for factor in packed.schema.factors)
    print(f"{packed.samples} images packed with their {names}")

    # A training step on two ranks: each takes its own half of the same 16 samples. In your job: rank=dist.get_rank().
    ranks = [ShardStream(shards, batch_size=BATCH, rank=rank, ranks=2) for rank in (0, 1)]
    alone = ShardStream(shards, batch_size=BATCH)
    for _, first, second, whole in zip(range(3), *ranks, alone, strict=False):
        assert first.keys + second.keys == whole.keys
    print(f"of each step rank 0 has {len(first.keys)} images, rank 1 the other {len(second.keys)}")

    # The state goes into your checkpoint. It means the same on any number of ranks and workers.
    state = ranks[0].state_dict()
    resumed = ShardStream(shards, batch_size=BATCH, workers=1)
    resumed.load_state_dict(state)
    with resumed:
        assert next(iter(resumed)).keys == next(iter(alone)).keys
    print(f"resumed behind sample {state['position']} on one rank: the next batch is the one that was due")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        given = Path(sys.argv[1]) if sys.argv[1:] else Path(temporary) / "photos"
        if not sys.argv[1:]:
            make_images(given)
        stream_shards(given, given.with_suffix(".shards"))
