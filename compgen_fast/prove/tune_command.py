"""`compgen tune`: which configurations were chosen, with what they gain, and the table rewritten."""

from __future__ import annotations

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from compgen_fast.kernels.launch import CONFIGS, architecture_of
from compgen_fast.prove.ahead_of_time import TARGETS
from compgen_fast.prove.catalogue import shipped_rows
from compgen_fast.prove.tuning import Choice, choices, write


def run(kernel: str | None, architectures: tuple[str, ...], device: str) -> int:
    """Chooses all rows of the architectures, or those of one kernel."""
    console = Console()
    by = "modelled"
    if device == "cuda":
        import torch

        architectures = (architecture_of(torch.device("cuda")),)
        by = f"measured on {torch.cuda.get_device_name()}"
    write([], by)  # rows that were edited by hand are where it starts from
    rows = [row for row in shipped_rows(architectures[0]) if kernel is None or row.kernel.split()[0] == kernel]
    found: list[tuple[str, Choice]] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("rows", total=len(rows) * len(architectures))
        for architecture, choice in choices(rows, list(architectures), device):
            found.append((architecture, choice))
            progress.advance(task)
    write(found, by)
    console.print(_table(found, by))
    console.print(f"{CONFIGS} written. Next: compgen prove --record")
    return 0


def _table(found: list[tuple[str, Choice]], by: str) -> Table:
    table = Table(title=f"configurations that changed ({by}); times of what the necessary bytes take")
    for column in ("architecture", "kernel", "bits", "slots", "width", "before", "now", "time before", "time now"):
        table.add_column(column)
    for architecture, choice in found:
        row = choice.row
        if choice.new != choice.old:
            numbers = (str(row.bits), str(row.S), str(row.D), str(choice.old), str(choice.new))
            times = (f"{choice.old_score:.2f}", f"{choice.new_score:.2f}")
            table.add_row(architecture, row.kernel, *numbers, *times)
    return table


ARCHITECTURES = tuple(TARGETS)
