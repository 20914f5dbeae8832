"""The numbers of a perception study, drawn together over seeds: rows of methods, the finding, and the tables.

It reads the dictionary of results.json and nothing else. Accuracy here is of objects, the mean over them where an image
shows two; ID means seen combinations, OOD unseen ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from compgen_fast.report.page import NOTHING, Grid
from compgen_fast.report.study import Results, known, place, seeds_of

METHODS = ("supervised", "supervised_longer", "vae")
DECODERS = ("unconstrained", "unconstrained+hessian", "apart", "attention", "hessian", "additive")
INFERENCES = ("encoder", "search", "newton", "replay", "replay+search")
SLOT_ENCODERS = {
    "dense": "Dense layers",
    "queries": "Transformer",
    "attention": "Slot Attention",
    "learned_attention": "Slot Attention (learned)",
}
MEASURES = {
    "block_hessian_share": ("interaction", ".2g"),
    "jis": ("JIS", ".3f"),
    "j_ari": ("J-ARI", ".3f"),
    "fg_ari": ("FG-ARI", ".3f"),
    "composite_error": ("composite error", ".4f"),
}
"""Of a decoder beside its error: title and format."""
MARGIN = 0.05  # of accuracy: a smaller fall or lift is not called one


@dataclass(frozen=True)
class Row:
    """One method and its entries in results.json, one per seed. ``encoder`` is None for the study's main one."""

    encoder: str | None
    method: str
    decoder: str | None
    inference: str
    entries: tuple[Mapping[str, Any], ...]

    @property
    def name(self) -> str:
        prefix = "" if self.encoder is None else f"{SLOT_ENCODERS.get(self.encoder, self.encoder)}: "
        return prefix + (
            spoken(self.method) if self.decoder is None else f"{spoken(self.decoder)}, {spoken(self.inference)}"
        )

    @property
    def seen(self) -> tuple[float, ...]:
        """Accuracy ID, one per seed."""
        return tuple(of_objects(entry["accuracy"], "id") for entry in self.entries)

    @property
    def unseen(self) -> tuple[float, ...]:
        """Accuracy OOD, one per seed."""
        return tuple(of_objects(entry["accuracy"], "ood") for entry in self.entries)

    def error(self, part: str) -> tuple[float, ...]:
        return known(entry["mse"][part] for entry in self.entries)


def rows(results: Results, *, main: bool = True) -> list[Row]:
    """The methods of the study's main slot encoder, or of all others, in the order of the tables.

    First those without a decoder, then by decoder and inference. An entry that names no slot encoder has the main one.
    """
    found: dict[tuple[str | None, str, str | None, str], list[Mapping[str, Any]]] = {}
    for entry in results["methods"]:
        encoder = entry.get("encoder")
        if encoder == results.get("encoder"):
            encoder = None
        if main == (encoder is None):
            found.setdefault((encoder, entry["method"], entry["decoder"], entry["inference"]), []).append(entry)
    orders = ((None, *SLOT_ENCODERS), METHODS, (None, *DECODERS), INFERENCES)
    return [
        Row(*key, entries=tuple(sorted(found[key], key=lambda entry: entry["seed"])))
        for key in sorted(found, key=lambda key: [place(*pair) for pair in zip(orders, key, strict=True)])
    ]


def spoken(name: str) -> str:
    """A method or an inference as a reader says it."""
    return {"newton": "search by Newton"}.get(name, name.replace("+", " + ").replace("_", ", "))


def of_objects(accuracy: Mapping[str, Mapping[str, float]], part: str) -> float:
    """The mean over the objects of an image, ``part`` being id or ood."""
    return fmean(accuracy[name][part] for name in _objects(accuracy))


def chance(results: Results) -> float:
    """Accuracy of a guess."""
    return fmean(results["chance"][name] for name in _objects(results["chance"]))


def _objects(factors: Iterable[str]) -> list[str]:
    names = list(factors)
    objects = [name for name in names if name.startswith("object_")]
    if not objects:
        raise ValueError(f"results.json: no object among {', '.join(names) or 'nothing'}; expected object_1")
    return objects


def recovered(row: Row, among: Sequence[Row]) -> float | None:
    """The share of its encoder's fall that a method wins back, of means over seeds:

        (method's OOD − encoder's OOD) / (encoder's ID − encoder's OOD)

    Longer training is held against the supervised encoder. None for an encoder itself, and where nothing fell.
    """
    encoder = encoder_of(row, among)
    if encoder is None:
        return None
    fall = fmean(encoder.seen) - fmean(encoder.unseen)
    return (fmean(row.unseen) - fmean(encoder.unseen)) / fall if fall >= MARGIN else None


def encoder_of(row: Row, among: Sequence[Row]) -> Row | None:
    """The encoder that a method starts from, if it is not that encoder."""
    start = (row.encoder, "supervised" if row.decoder is None else row.method, row.decoder, "encoder")
    for other in among:
        if (other.encoder, other.method, other.decoder, other.inference) == start:
            return None if other is row else other
    return None


def finding(results: Results) -> str:
    """The page in a few sentences, true of these numbers whatever they are."""
    among = rows(results)
    inversions = [row for row in among if row.decoder is not None and encoder_of(row, among) is not None]
    if not inversions:
        readings = ", ".join(f"{row.name} reads {percent(fmean(row.unseen))}" for row in among)
        return f"Objects in unseen combinations: {readings or 'nothing was read'}; chance {percent(chance(results))}."
    most = max(len(row.entries) for row in inversions)
    inversions = [row for row in inversions if len(row.entries) == most]  # one seed may be a lucky one
    best = max(inversions, key=lambda row: fmean(row.unseen))
    encoder = encoder_of(best, among)
    assert encoder is not None
    inference = spoken(best.inference).replace("+", "and")
    picked = f", the best of {len(inversions)} inversions here," if len(inversions) > 1 else ""
    return (
        f"{inference[:1].upper()}{inference[1:]} through the {best.decoder} decoder{picked} "
        f"{'read' if '+' in best.inference else 'reads'} {percent(fmean(best.unseen))} of objects in unseen "
        f"combinations; its encoder alone reads {percent(fmean(encoder.unseen))}, and {percent(fmean(encoder.seen))} "
        f"in seen ones. {_verdict(best, encoder, recovered(best, among))} {_controls(results, best, among)}"
    )


def _verdict(best: Row, encoder: Row, share: float | None) -> str:
    points = f"{100 * MARGIN:.0f} points"
    if share is None:
        return f"That encoder falls by less than {points}: there is little to win back."
    before = {entry["seed"]: unseen for entry, unseen in zip(encoder.entries, encoder.unseen, strict=True)}
    start = fmean(encoder.unseen)  # for a seed that the encoder lacks
    lifts = [unseen - before.get(entry["seed"], start) for entry, unseen in zip(best.entries, best.unseen, strict=True)]
    if min(lifts) < MARGIN:
        return f"That is not {points} better in every seed."
    return f"That wins back {percent(share)} of the fall."


def _controls(results: Results, best: Row, among: Sequence[Row]) -> str:
    """What the best stands against: the same through decoders without a penalty, encoders alone, chance."""
    others = {
        "unconstrained": "an unconstrained decoder",
        "apart": "one whose slots are painted apart, without a penalty,",
    }
    told = [
        f"the same through {name} {percent(fmean(row.unseen))}"
        for decoder, name in others.items()
        for row in among
        if row.decoder == decoder and row.inference == best.inference and row is not best
    ]
    supervised = [row for row in among if row.decoder is None]
    if supervised:
        told.append(f"the best supervised encoder {percent(max(fmean(row.unseen) for row in supervised))}")
    return f"For comparison: {', '.join([*told, f'chance {percent(chance(results))}'])}."


def percent(share: float) -> str:
    return f"{round(100 * share)} %"


def spread(values: Sequence[float], form: str, scale: float = 1) -> str:
    """Mean ± standard deviation, the mean alone of a single seed."""
    if not values:
        return NOTHING
    scaled = [scale * value for value in values]
    return f"{fmean(scaled):{form}}" + (f" ± {stdev(scaled):{form}}" if len(scaled) > 1 else "")


def main_table(results: Results) -> Grid:
    """A line per method of the main slot encoder."""
    title = f"Objects read ({seeds_of(results)}; chance {percent(chance(results))})"
    return _methods_table(title, rows(results))


def other_encoders_table(results: Results) -> Grid:
    """A line per method of another slot encoder."""
    return _methods_table("Other slot encoders", rows(results, main=False))


def _methods_table(title: str, among: Sequence[Row]) -> Grid:
    head = ("method", "ID %", "OOD %", "won back", "error ID", "error OOD", "images/s", "training s")
    return Grid(
        title,
        head,
        tuple(
            (
                row.name,
                spread(row.seen, ".1f", 100),
                spread(row.unseen, ".1f", 100),
                NOTHING if (share := recovered(row, among)) is None else percent(share),
                spread(row.error("id"), ".4f"),
                spread(row.error("ood"), ".4f"),
                *(_mean(known(entry[key] for entry in row.entries)) for key in ("images_per_second", "train_seconds")),
            )
            for row in among
        ),
        words=("method",),
    )


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):,.0f}" if values else NOTHING


def decoder_names(results: Results) -> list[str]:
    return sorted({entry["decoder"] for entry in results["decoders"]}, key=lambda name: place(DECODERS, name))


def measured(results: Results, decoder: str, key: str, part: str | None = None) -> tuple[float, ...]:
    """A measure of a decoder, one per seed, ``part`` being id or ood where it has both."""
    entries = [entry for entry in results["decoders"] if entry["decoder"] == decoder]
    return known(entry[key] if part is None else entry[key][part] for entry in entries)


def decoder_table(results: Results) -> Grid:
    """A line per decoder."""
    lines = tuple(
        (
            spoken(name),
            _mean(measured(results, name, "parameters")),
            *(spread(measured(results, name, "mse", part), ".4f") for part in ("id", "ood")),
            *(spread(measured(results, name, key), form) for key, (_, form) in MEASURES.items()),
        )
        for name in decoder_names(results)
    )
    head = ("decoder", "parameters", "error ID", "error OOD", *(title for title, _ in MEASURES.values()))
    return Grid(f"Decoders ({seeds_of(results)})", head, lines, words=("decoder",))


def factors_table(results: Results) -> Grid:
    """Everything that was read: accuracy of each category and R² of each number, ID and OOD."""
    among = [*rows(results), *rows(results, main=False)]
    kinds = (("accuracy", " %", ".1f", 100), ("r2", " R²", ".3f", 1))
    columns = [
        (kind, name, part, unit, form, scale)
        for kind, unit, form, scale in kinds
        for name in dict.fromkeys(name for entry in results["methods"] for name in entry[kind])
        for part in ("id", "ood")
    ]
    lines = tuple(
        (
            row.name,
            *(
                spread(known(entry[kind].get(name, {}).get(part) for entry in row.entries), form, scale)
                for kind, name, part, _, form, scale in columns
            ),
        )
        for row in among
    )
    head = ("method", *(f"{name}{unit} {part.upper()}" for _, name, part, unit, _, _ in columns))
    return Grid("Everything that was read", head, lines, words=("method",))
