"""Training runs for tests: `cgf train` in processes of its own, on the smallest of models and worlds."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compgen_fast.train.given import without

SETTINGS = """
    --model.image-size 16 --model.slot-dim 8 --model.encoder.width 16 --model.encoder.slot-layers 1
    --model.encoder.slot-heads 2 --model.decoder.heads 2 --model.decoder.head-dim 8 --model.decoder.query-dim 16
    --model.decoder.slot-hidden 32 --model.loss.alpha-warmup 4 --data.size 64 --data.validation-size 16
    --data.workers 0 --batch-size 8 --log-every 1 --optimiser.warmup 2 --optimiser.decay constant --steps 12
"""


def settings_of(out: Path, *settings: str) -> list[str]:
    """Of the tiny model, whose images are packed beside ``out`` where no shards are given. Later settings win."""
    places = ["--out", str(out), "--data.cache", str(out.parent / "data")]
    words = _last_wins(*SETTINGS.split(), *places, *settings)
    return without(words, ("data.cache", "data.size", "data.validation-size")) if "--data.shards" in words else words


def _last_wins(*settings: str) -> list[str]:
    """Each option once: the last time it was given."""
    options: dict[str, list[str]] = {}
    for word in settings:
        if word.startswith("--"):
            options.pop(word, None)
            options[word] = [word]
        else:
            options[next(reversed(options))].append(word)
    return [word for option in options.values() for word in option]


def start_recipe(recipe: str, *settings: str) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "compgen_fast", "train", recipe, *settings],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(out: Path, *settings: str) -> "subprocess.Popen[str]":
    return start_recipe("slot_vae_cpu", *settings_of(out, *settings))


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """What was printed; the exit code must be the one given."""
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == code, printed
    return printed


def train(out: Path, *settings: str, code: int = 0) -> str:
    """Runs to the end, expects the exit code, returns what was printed."""
    return finish(start(out, *settings), code)


def lines(out: Path) -> dict[int, Mapping[str, Any]]:
    """metrics.jsonl by step; a line that is still being written is left out."""
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    return {row["step"]: row for row in rows}


def losses(out: Path) -> list[float]:
    return [row["loss"] for _, row in sorted(lines(out).items())]


def wait_until(reached: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not reached():
        if process.poll() is not None:
            raise AssertionError(f"the run ended early: {process.communicate()[0]}")
        if time.monotonic() > until:
            process.kill()
            raise AssertionError(f"nothing after {seconds} s: {process.communicate()[0]}")
        time.sleep(0.05)
