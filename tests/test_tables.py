"""Every table that the program prints is whole on a terminal of 80 columns and on one of 120."""

import io
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType

import compgen_fast
from compgen_fast import env
from compgen_fast.bench import bumps, generate, report, search, stream, train
from compgen_fast.models import summary
from compgen_fast.report import bumps as bumps_page
from compgen_fast.report import generation as generation_page
from compgen_fast.report import perception as perception_page
from compgen_fast.stream import inspection
from compgen_fast.studies.perception import plan as perception_plan
from compgen_fast.studies.perception import study as perception_study
from compgen_fast.tables import FOLDED, Sheet
from compgen_fast.train import profiling, scaling
from compgen_fast.train.metrics import Metrics
from compgen_fast.train.ranks import Ranks
from tests.bench.fakes import make_row
from tests.stream.stub import packed

WIDTHS = (80, 120)
SOURCES = Path(compgen_fast.__file__).parent
RECORDS = Path(__file__).parents[1] / "results"
ALLOWED = {"table": {"tables", "progress", "metrics"}, "progress": {"progress", "metrics"}}


def shown(something: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(something)
    return captured.get()


def sheets(something: RenderableType) -> Iterator[Sheet]:
    if isinstance(something, Sheet):
        yield something
    if isinstance(something, Group):
        for each in something.renderables:
            yield from sheets(each)


def test_numbers_that_do_not_fit_go_into_a_further_table_that_begins_with_the_same_words() -> None:
    sheet = Sheet("peer", *(f"number{n}" for n in range(6)))
    sheet.add_row("eager", *(6 * ["1234567.89"]))
    text = shown(sheet, 45)
    assert text.count("1234567.89") == 6 and text.count("eager") == text.count("peer") == 2
    assert shown(sheet, 90).count("eager") == 1


def test_a_header_breaks_between_words_and_words_wrap() -> None:
    sheet = Sheet("reason", "images per second", title="two")
    sheet.add_row("a long sentence that wraps between its words", "12.5")
    text = shown(sheet, 30)
    assert {"images", "per", "second", "sentence", "between"} <= set(text.split())
    assert max(map(len, text.splitlines())) <= 30


# ------------------------------------------------------------------------------------- what the program prints


def benchmarks() -> Iterator[RenderableType]:
    wide = {"our_ms": 12345.67, "peer_ms": 23456.78, "ratio": 123.45, "ratio_low": 100.01, "ratio_high": 150.02}
    rows = [
        make_row(direction="backward", peer="torch.func.hessian", peak_ratio=123.45, **wide),
        make_row(peer="reverse over reverse", does_less="a second derivative is missing"),
        make_row(peer="flash-attn", ratio=None, unsupported="needs CUDA"),
    ]
    yield report.table("slot_cross_attention, 4 × 4096 pixels, 7 slots", rows)
    yield bumps.table(rows)
    yield generate.training_table(rows)
    yield train.engine_table("64 px, batch 32 per rank", rows)
    yield train.scaling_table("64 px, batch 32 per rank", rows)
    sizes = train.quick_sizes()
    yield train.speed_table(sizes, [[make_row()] for _ in sizes], 1e11)
    yield stream.memory_table()
    numbers = {"ratio": 12.34, "ratio_low": 11.11, "ratio_high": 13.33, "gate": None, "unsupported": None}
    yield stream.table(
        [SimpleNamespace(case="jpg 128 px, 2 workers", reader="WebDataset", samples_per_second=12345.6, **numbers)]
    )  # type: ignore[list-item]
    searched = [
        SimpleNamespace(
            case="trained 32 px, 2 slots, 32 images", contender=name, rate=0.05, steps=192, images_per_second=1234.5,
            start_error=1.0, loop_error=0.1, loop_steps=192, bound=0.11, error=0.1, error_median=0.1, **numbers,
        )
        for name in ("search", "eager")
    ]  # fmt: skip
    yield search.table(searched)  # type: ignore[arg-type]
    yield search.summary(searched)  # type: ignore[arg-type]


def studies() -> Iterator[RenderableType]:
    for name, page in (("perception", perception_page), ("bumps", bumps_page), ("generation", generation_page)):
        yield page.tables(json.loads((RECORDS / name / "results.json").read_text()))
    yield perception_study.planned(perception_plan.plan("cpu", "object", 1, Path("out"))[:3])


def machine() -> Iterator[RenderableType]:
    found = env.collect()
    yield env.machine_table(found)
    yield env.ops_table(found)


def proofs() -> Iterator[RenderableType]:
    pytest.importorskip("triton")
    from compgen_fast.prove import command, ladder, tune_command
    from compgen_fast.prove.roofline import LaunchWork, Work
    from tests.prove import rows

    made = [rows.made_row(registers=255, spills=1234, shared=233472), rows.made_row("gfx942")]
    yield command.kernel_table("slot_cross_attention", made, set())
    work = Work(123_456_789, (LaunchWork("_forward_kernel", 1.5e8, 2e8, 1e9, 1e9),))
    climbed = ladder.Ladder(tuple(made), (), (rows.made_emulation(),), ((rows.CASE, work),))
    yield command.roofline_table(climbed)
    yield command.summary_table(ladder.steps(climbed, frozenset()))
    row = SimpleNamespace(kernel="slot_cross_attention_backward", bits=32, S=64, D=128)
    choice = SimpleNamespace(row=row, old=[64, 64, 4, 1], new=[128, 64, 8, 2], old_score=1.23, new_score=1.11)
    yield tune_command._table([("sm_90", choice)], "modelled")  # type: ignore[list-item]


def training(folder: Path) -> Iterator[RenderableType]:
    with Metrics(
        folder, steps=1, batch_size=8, flops_per_image=1e6, peak=1e9, first_step=0, ranks=Ranks.alone(), every=1,
        console=Console(quiet=True),
    ) as told:  # fmt: skip
        told.log(0, {"loss": 1.0}, 0.1, None)
    yield told.summary()
    yield profiling.tables(
        [
            profiling.Row("phase", "penalty", 12345.67, 0.251, None),
            profiling.Row("operator", "aten::_scaled_dot_product_flash_attention_for_cpu_backward", 1234.5, 0.5, 12345),
        ]
    )
    inputs = scaling.ScaleInputs(123_456_789, 1e12, 256, 2e5)
    yield scaling.show(inputs, scaling.plan(inputs))
    parts = [summary.Part("decoder.painter", 123_456_789, 123_456_789)]
    stages = [summary.Stage("decoder.painter.layers.0", (1, 4096, 768))]
    made = summary.Summary(tuple(parts), tuple(stages), 123_456_789, 123_456_789, 987_654_321)
    yield from (table(made) for table in (summary.parameters_table, summary.flops_table, summary.stages_table))
    found = packed(folder / "shards")
    yield inspection._summary(found, None)
    yield inspection._factors(found)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[Sheet]:
    everything = (*benchmarks(), *studies(), *machine(), *proofs(), *training(tmp_path_factory.mktemp("run")))
    return [sheet for each in everything for sheet in sheets(each)]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_is_cut_and_no_number_or_header_broken(printed: list[Sheet], width: int) -> None:
    assert len(printed) > 30
    for sheet in printed:
        text = shown(sheet, width)
        assert max(map(cell_len, text.splitlines())) <= width, sheet.head
        numbers = [cells[column].plain for cells in sheet.rows for column in sheet.numbers]
        assert all(number in text for number in numbers), sheet.head
        whole = (*sheet.head * sheet.show_header, *(cell.plain for cell in chain(*sheet.rows)))
        words = {word for cell in whole for word in cell.split() if len(word) <= FOLDED}
        assert words <= set(text.split()), sheet.head


def test_tables_and_bars_are_made_in_one_place_each() -> None:
    sources = [path for folder in (SOURCES, SOURCES / "bench") for path in folder.rglob("*.py")]
    users = {name: {path.stem for path in sources if f"rich.{name} import" in path.read_text()} for name in ALLOWED}
    assert users == ALLOWED
