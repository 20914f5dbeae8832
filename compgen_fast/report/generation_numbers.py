"""The numbers of a generation study: shares of images that show what was asked for, by level, step and variation."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from compgen_fast.report.page import NOTHING, Grid
from compgen_fast.report.study import Results

SEEN, LEVEL_1, LEVEL_2 = ("000", "001", "010", "100"), ("011", "101", "110"), ("111",)
LEVELS = {"seen": SEEN, "level 1": LEVEL_1, "level 2": LEVEL_2}
COMPOSITIONS = (*SEEN, *LEVEL_1, *LEVEL_2)
OBJECTIVES = {
    "dit-vae": "DiT, VAE latents", "dit-vq": "DiT, VQ latents", "mar": "MAR", "givt": "GIVT", "maskgit": "MaskGIT",
}  # fmt: skip
TOLD = {
    "full": "everything", "quantised": "quantised", "dropout": "concept dropout", "both": "quantised + dropout",
}  # fmt: skip
FACTORS = ("shape", "colour", "size")

Run = Mapping[str, Any]
Point = Mapping[str, Any]


def level(point: Point, compositions: Sequence[str]) -> float:
    """The mean over compositions of the share of images with all factors right."""
    return fmean(point["compositions"][name] for name in compositions)


def last(run: Run) -> Point:
    point: Point = run["curve"][-1]
    return point


def best(run: Run) -> Point:
    """The point where level 1 is best, the earliest of equals. Level 2, which is reported, has no say in it."""
    point: Point = max(run["curve"], key=lambda each: (level(each, LEVEL_1), -each["step"]))
    return point


def chosen(runs: Sequence[Run], objective: str, told: str = "full", jepa: Sequence[int] = ()) -> list[Run]:
    """The seeds of one variation."""
    wanted = (objective, told, [*jepa])
    return [run for run in runs if (run["objective"], run["told"], run["jepa"]) == wanted]


def layers_of(results: Results) -> list[tuple[int, ...]]:
    """The sets of layers with JEPA, as they were run."""
    return list(dict.fromkeys(tuple(run["jepa"]) for run in results["runs"] if run["jepa"]))


def compared(results: Results) -> dict[str, dict[str, list[Run]]]:
    """By part, what is compared: the seeds of each variation by its name."""
    runs = results["runs"]
    parts = {
        "objectives": {name: chosen(runs, objective) for objective, name in OBJECTIVES.items()},
        "conditioning": {name: chosen(runs, "dit-vae", told) for told, name in TOLD.items()},
        "jepa": {"without JEPA": chosen(runs, "maskgit")}
        | {f"after {_listed(layers)}": chosen(runs, "maskgit", jepa=layers) for layers in layers_of(results)},
    }
    found = {part: {name: seeds for name, seeds in groups.items() if seeds} for part, groups in parts.items()}
    return {part: groups for part, groups in found.items() if len(groups) > 1}


def _listed(layers: Sequence[int]) -> str:
    return ("layer " if len(layers) == 1 else "layers ") + ", ".join(map(str, layers))


def spread(shares: Sequence[float]) -> str:
    """In percent, the mean ± standard deviation; of one seed, or of equal ones, the mean."""
    if not shares:
        return NOTHING
    deviation = f" ± {100 * stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * fmean(shares):.1f}{deviation}"


def part_table(title: str, groups: Mapping[str, Sequence[Run]]) -> Grid:
    """Of each variation: all levels at the last step, and level 2 at the step that is best on level 1."""
    head = (title, "seen %", "level 1 %", "level 2 %", "best step", "level 2 there %", "s")
    rows = []
    for name, runs in groups.items():
        shares = [spread([level(last(run), names) for run in runs]) for names in LEVELS.values()]
        there = spread([level(best(run), LEVEL_2) for run in runs])
        steps = ", ".join(f"{best(run)['step']:,}" for run in runs)
        rows.append((name, *shares, steps, there, f"{fmean(run['seconds'] for run in runs):.0f}"))
    return Grid(title, head, tuple(rows), words=(title,))


def tokenizers_table(results: Results) -> Grid:
    """What a generator could reach at most: real images, and what tokenizers make of them."""
    rows = [("real images", *_by_level(results["tokenizers"][0]["real"]), NOTHING)] if results["tokenizers"] else []
    for found in results["tokenizers"]:
        name = {"vae": "VAE", "vq": "VQ-VAE"}[found["tokenizer"]]
        rows.append((name, *_by_level(found["reconstructed"]), f"{found['error']:.1e}"))
    head = ("told right by the probes", *(f"{name} %" for name in LEVELS), "squared error")
    return Grid("Probes and tokenizers", head, tuple(rows), words=head[:1])


def _by_level(shares: Mapping[str, float]) -> list[str]:
    return [f"{100 * fmean(shares[name] for name in names):.1f}" for names in LEVELS.values()]


def circuits_table(results: Results) -> Grid:
    """Units that matter, how many of them are heads, how many matter to several factors, how much circuits share; and
    how many seen compositions are right, and are still with all heads out.
    """
    head = ("circuits", "matter", "heads", "several %", "overlap", "seen %", "without heads %")
    rows = []
    for name, runs in compared(results).get("jepa", {}).items():
        found = [run["circuits"] for run in runs if "circuits" in run]
        if not found:
            continue
        some, several = ([sum(each[key]) for each in found] for key in ("mattering", "polysemantic"))
        shares = [b / a for a, b in zip(some, several, strict=True) if a]
        of_heads, overlap = fmean(sum(each["mattering_heads"]) for each in found), fmean(e["overlap"] for e in found)
        right = [spread([each[key] for each in found]) for key in ("right", "right_without_attention")]
        rows.append((name, f"{fmean(some):.1f}", f"{of_heads:.1f}", spread(shares), f"{overlap:.2f}", *right))
    return Grid("Circuits of MaskGIT", head, tuple(rows), words=head[:1])
