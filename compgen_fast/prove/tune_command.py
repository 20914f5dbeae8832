"""`cgf tune`: which configurations were chosen, with what they gain, and the table rewritten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from compgen_fast.progress import following
from compgen_fast.prove.command import chosen, refuse_without_compiler
from compgen_fast.tables import Sheet

if TYPE_CHECKING:
    from compgen_fast.prove.tuning import Choice


def run(kernel: str | None, arch: str | None, device: str) -> int:
    """Chooses all rows of the architectures, or those of one kernel. Each is written as it is found: nothing is lost
    when an hour of choosing is cut off.
    """
    refuse_without_compiler("tune")
    import torch

    from compgen_fast.kernels.launch import CONFIGS, architecture_of
    from compgen_fast.prove.ahead_of_time import TARGETS
    from compgen_fast.prove.catalogue import shipped_rows
    from compgen_fast.prove.tuning import choices, write

    console, by = Console(), "modelled"
    architectures = chosen("tune", "architecture", tuple(arch.split(",")) if arch else (), tuple(TARGETS))
    if device == "cuda":
        architectures, by = (architecture_of(torch.device("cuda")),), f"measured on {torch.cuda.get_device_name()}"
    rows = shipped_rows(architectures[0])
    kernels = tuple(dict.fromkeys(row.kernel.split()[0] for row in rows))
    wanted = chosen("tune", "kernel with a configuration", (kernel,) if kernel else (), kernels)
    rows = tuple(row for row in rows if row.kernel.split()[0] in wanted)
    write([], by)  # rows that were edited by hand are where it starts from
    found: list[tuple[str, Choice]] = []
    with following("choose", len(rows) * len(architectures), "configurations") as advance:
        for each in choices(rows, architectures, device):
            found.append(each)
            write([each], by)
            advance()
    console.print(_table(found, by))
    console.print(f"written to {CONFIGS}; next: cgf prove --record", soft_wrap=True)
    return 0


def _table(found: list[tuple[str, Choice]], by: str) -> Sheet:
    changed = [(architecture, choice) for architecture, choice in found if choice.new != choice.old]
    title = f"{len(changed)} of {len(found)} configurations changed, {by}; times are multiples of what the bytes need"
    words = ("chip", "kernel", "before", "now")
    head = ("chip", "kernel", "bits", "slots", "width", "before", "now", "time before", "time now")
    table = Sheet(*head, words=words, title=title)
    for architecture, choice in changed:
        row = choice.row
        numbers = (str(each) for each in (row.bits, row.S, row.D, choice.old, choice.new))
        table.add_row(architecture, row.kernel, *numbers, f"{choice.old_score:.2f}", f"{choice.new_score:.2f}")
    return table
