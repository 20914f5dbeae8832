"""The numbers of a bump study: its tables, and the page in a few sentences."""

from collections.abc import Sequence
from statistics import fmean, median, stdev

from compgen_fast.report.bumps_plots import (
    DECODERS,
    ENCODINGS,
    OUTSIDE,
    REGULARISERS,
    TARGETS,
    WAYS,
    Entry,
    relative,
)
from compgen_fast.report.page import NOTHING, Grid
from compgen_fast.report.study import Results, known, place, seeds_of


def short(value: float, digits: int = 1) -> str:
    """1.2e-3, not 1.2e-03: the columns are many."""
    mantissa, power = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(power)}"


def spread(values: Sequence[float | None]) -> str:
    """Mean ± standard deviation, the mean alone of a single seed."""
    found = known(values)
    if not found:
        return NOTHING
    return short(fmean(found)) + (f" ± {short(stdev(found), 0)}" if len(found) > 1 else "")


def times(value: float) -> str:
    """A multiple of a level, to two digits."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def decoder_name(entry: Entry) -> str:
    return f"{DECODERS.get(entry['decoder'], entry['decoder'])} {entry['depth']}"


def ordered(results: Results) -> list[Entry]:
    """The naive decoders: MLPs before CNNs, then by depth and encoding."""
    kinds, encodings = tuple(DECODERS), tuple(ENCODINGS)
    return sorted(
        results["failure"],
        key=lambda entry: (place(kinds, entry["decoder"]), entry["depth"], place(encodings, entry["encoding"])),
    )


def failure_table(results: Results) -> Grid:
    """A line per decoder and encoding. Blank: of the held-out positions, also of their core."""
    lines = tuple(
        (
            decoder_name(entry),
            entry["encoding"],
            *(spread(entry[part]) for part in ("id", "ood", "core")),
            short(entry["blank"]["ood"]),
            *(times(fmean(relative(entry, part))) if relative(entry, part) else NOTHING for part in ("ood", "core")),
        )
        for entry in ordered(results)
    )
    head = ("decoder", "encoding", "ID", "OOD", "core", "blank", "OOD ÷ blank", "core ÷ blank")
    return Grid(f"Naive decoders ({seeds_of(results)})", head, lines, words=("decoder", "encoding"))


def shots_table(results: Results) -> Grid:
    """A line per decoder and number of bumps shown inside the square."""
    lines = tuple(
        (
            decoder_name(entry),
            entry["encoding"],
            str(count),
            spread([point["ood"] for point in entry["curve"] if point["shots"] == count]),
            short(entry["blank"]),
        )
        for entry in results["few_shot"]
        for count in sorted({point["shots"] for point in entry["curve"]})
    )
    head = ("decoder", "encoding", "bumps inside", "OOD", "blank")
    return Grid(f"Few shots inside the square ({seeds_of(results)})", head, lines, words=("decoder", "encoding"))


def tokens_table(results: Results) -> Grid:
    """A line per choice of regularisers."""
    found = results["tokens"] or {"outcomes": (), "blank": 1.0}
    lines = []
    for name in REGULARISERS:
        among = [outcome for outcome in found["outcomes"] if outcome["regulariser"] == name]
        if among:
            levels = [[outcome[part] for outcome in among] for part in ("id", "ood")]
            share = times(fmean(known(levels[1])) / found["blank"]) if known(levels[1]) else NOTHING
            lines.append((name, *map(spread, levels), short(found["blank"]), share))
    head = ("regularisers", "ID", "OOD", "blank", "OOD ÷ blank")
    return Grid(f"Plan A: tokens ({seeds_of(results)})", head, tuple(lines), words=("regularisers",))


def penalty_table(results: Results) -> Grid:
    """A line per target, without the interaction penalty and with it."""
    lines = tuple(
        (
            TARGETS.get(entry["target"], entry["target"]),
            "outside" if entry["target"] in OUTSIDE else "inside",
            "with" if penalised else "without",
            *(
                spread([each[part] for each in entry["outcomes"] if each["penalised"] == penalised])
                for part in ("id", "ood")
            ),
            short(entry["mean_image"]["ood"]),
        )
        for entry in sorted(results["penalty"], key=lambda entry: place(tuple(TARGETS), entry["target"]))
        for penalised in (False, True)
    )
    head = ("target", "F_int", "penalty", "ID", "OOD", "mean image")
    title = f"Plan A: the interaction penalty ({seeds_of(results)})"
    return Grid(title, head, lines, words=("target", "F_int", "penalty"))


def bumps_table(results: Results) -> Grid:
    """A line per size of image: the least number of bumps of each seed."""
    ways = {"stripes": "with stripes", "anywhere": "anywhere", "outside": "outside alone", "no white": "no white"}
    found = {(entry["size"], entry["way"]): entry for entry in results["thresholds"]}
    lines = tuple(
        (str(size), *(_needed(found.get((size, way))) for way in ways)) for size in sorted({size for size, _ in found})
    )
    return Grid("Plan B: bumps needed, one number per seed", ("N", *ways.values()), lines, words=())


def _needed(entry: Entry | None) -> str:
    if entry is None:
        return NOTHING
    if not any(entry["needed"]):
        return f"never (of {entry['most']})"
    return ", ".join(str(bumps) if bumps else "never" for bumps in entry["needed"])


def exponents_table(results: Results) -> Grid:
    lines = tuple(
        (
            WAYS[way][0],
            f"{fit['exponent']:.2f}",
            f"{fit['low']:.2f} to {fit['high']:.2f}",
            str(fit["points"]),
        )
        for way, fit in results["exponents"].items()
    )
    head = ("way", "exponent of N", "95 % interval", "points")
    return Grid("Plan B: bumps needed ~ N^exponent", head, lines, words=("way",))


def finding(results: Results) -> str:
    """The page in a few sentences, true of these numbers whatever they are."""
    told = [_failing(results), _mended(results), _cheaper(results)]
    return " ".join(sentence for sentence in told if sentence) or "Nothing was run."


def _failing(results: Results) -> str:
    shares = [fmean(relative(entry, "core")) for entry in results["failure"] if relative(entry, "core")]
    if not shares:
        return ""
    failed = sum(share >= 1 for share in shares)
    seen = median(fmean(relative(entry, "id")) for entry in results["failure"])
    return (
        f"Asked for bumps at positions they never saw, {failed} of {len(shares)} decoders of disentangled codes make "
        f"errors as large as a blank image or larger, more than 2σ from any known position; the median is "
        f"{times(median(shares))} blank images there and {times(seen)} at known positions."
    )


def _mended(results: Results) -> str:
    if not results["tokens"]:
        return ""
    levels = {
        name: fmean(each["ood"] for each in results["tokens"]["outcomes"] if each["regulariser"] == name)
        / results["tokens"]["blank"]
        for name in ("none", "both")
    }
    return (
        f"Tokens that render themselves are at {times(levels['none'])} blank images without regularisers and at "
        f"{times(levels['both'])} with both."
    )


def _cheaper(results: Results) -> str:
    found = {(entry["size"], entry["way"]): known(entry["needed"]) for entry in results["thresholds"]}
    sizes = [size for size, way in found if way == "stripes" and found[size, way] and found.get((size, "anywhere"))]
    if not sizes:
        return ""
    size = max(sizes)
    few, many = (median(found[size, way]) for way in ("stripes", "anywhere"))
    enough = "1 bump is enough" if few == 1 else f"{few:.0f} bumps are enough"
    return f"At N = {size}, {enough} once each factor is shown alone in stripes, else {many:.0f}."
