"""Plan B, by data: how many bumps does it take until held-out positions come out right?

Ways of showing k bumps to a rendering CNN, of which the smallest k that succeeds is sought by bisection:

- ``stripes``: k bumps outside the square, each factor alone (N vertical and N horizontal stripes), and white for none;
- ``anywhere``: k bumps of the whole image, the square included, judged at positions of the square that were not shown;

and two controls, tried with one k each:

- ``outside``: all bumps outside the square, and nothing else;
- ``no white``: N bumps outside the square and the stripes, without the white image.

Success is a mean squared error of less than a tenth of a blank image's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from compgen_fast.studies.bumps.decoders import rendering
from compgen_fast.studies.bumps.failure import Found, at_others, chosen
from compgen_fast.studies.bumps.fitting import Fit, draws, errors, optimise, squared
from compgen_fast.studies.bumps.sheet import Sheet, open_sheet

Way = Literal["stripes", "anywhere", "outside", "no white"]
SUCCESS = 0.1  # of the blank image's error


def ladder(most: int) -> list[int]:
    """Numbers of bumps that are tried: 1, 2, 3, 4, 6, 8, 11, 16, …, by factors of √2, and the most there are."""
    steps = {round(2 ** (half / 2)) for half in range(2 * most.bit_length())}
    return [*sorted(step for step in steps if step < most), most]


@dataclass(frozen=True)
class Threshold:
    """One size of image and one way, all seeds side by side in a stack."""

    part: ClassVar[str] = "plan-b"
    size: int
    way: Way
    seeds: tuple[int, ...]
    fit: Fit

    @property
    def name(self) -> str:
        return f"{self.way.replace(' ', '-')}-{self.size}"

    def run(self) -> Found:
        sheet = open_sheet(self.size, "bump")
        rungs = self._rungs(sheet)
        fails, succeeds = dict.fromkeys(self.seeds, -1), dict.fromkeys(self.seeds, len(rungs))
        tried: list[dict[str, Any]] = []
        while between := {s: (fails[s] + succeeds[s]) // 2 for s in self.seeds if succeeds[s] - fails[s] > 1}:
            counts = {seed: rungs[rung] for seed, rung in between.items()}
            for seed, ood in self._tried(sheet, counts).items():
                tried.append({"seed": seed, "bumps": counts[seed], "ood": ood})
                (succeeds if ood < SUCCESS * sheet.blank else fails)[seed] = between[seed]
        needed = [rungs[succeeds[seed]] if succeeds[seed] < len(rungs) else None for seed in self.seeds]
        return {"blank": sheet.blank, "most": rungs[-1], "tried": tried, "needed": needed}, {}

    def _rungs(self, sheet: Sheet) -> list[int]:
        if self.way in ("outside", "no white"):
            return [len(sheet.known) if self.way == "outside" else self.size]
        return ladder(len(sheet.known) if self.way == "stripes" else sheet.positions * 3 // 4)

    def _tried(self, sheet: Sheet, counts: Mapping[int, int]) -> dict[int, float]:
        """The error at held-out positions that were not shown, of each seed with its number of bumps."""
        pool = torch.arange(sheet.positions) if self.way == "anywhere" else sheet.known
        seeds, shown = list(counts), [chosen(pool, count, seed) for seed, count in counts.items()]
        white = sheet.white.repeat(self.size // 4)  # as often as one in nine of the images that are no bumps
        others = {"stripes": [torch.cat([sheet.stripes, white])], "no white": [sheet.stripes]}.get(self.way, [])
        groups = [[rows, *others] for rows in shown]
        decoder = rendering(seeds, sheet.codes.shape[1], self.size)
        optimise(decoder, squared(decoder, sheet.codes, sheet.images), draws(groups, seeds, self.fit), self.fit)
        found = errors(decoder, sheet, len(seeds))
        return {
            seed: at_others(each, sheet.held, rows) for seed, each, rows in zip(seeds, found, shown, strict=True)
        }  # fmt: skip
