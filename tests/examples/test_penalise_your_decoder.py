"""A training loop with the penalty, on one process and on two."""

import pytest

from tests.examples.scripts import path_of, printed_by
from tests.train.two_ranks import run_two_ranks


def losses(printed: str) -> dict[str, list[float]]:
    rows = [line.rsplit(maxsplit=5) for line in printed.splitlines()]
    return {how.strip(): [float(loss) for loss in row] for how, *row in rows}


def test_the_loss_falls_on_one_process() -> None:
    (alone,) = losses(printed_by("penalise_your_decoder.py")).values()
    assert alone[-1] < 0.7 * alone[0]


def test_two_ranks_train_as_one_does_under_ddp_and_under_fsdp2() -> None:
    script = f"import runpy; runpy.run_path({str(path_of('penalise_your_decoder.py'))!r}, run_name='__main__')"
    first, second = run_two_ranks(script)
    found = losses(first)
    assert list(found) == ["one process", "DDP, 2 ranks", "FSDP2, 2 ranks"] and not second
    for how, each in found.items():
        assert each == pytest.approx(found["one process"], abs=3e-6), how
