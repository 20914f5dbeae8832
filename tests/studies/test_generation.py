"""The generation study: its plan, circuits and claims, and the whole as small as it gets."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compgen_fast.cli import main
from compgen_fast.generate.config import JepaConfig, MaskGITConfig, TrunkConfig
from compgen_fast.generate.trunk import Block
from compgen_fast.models.build import check as check_model
from compgen_fast.report import generation as report
from compgen_fast.report.generation_numbers import COMPOSITIONS, best, level
from compgen_fast.studies import queue
from compgen_fast.studies.generation import circuits, prepare, study
from compgen_fast.studies.generation import plan as plans
from compgen_fast.studies.generation.claims import claims
from compgen_fast.studies.generation.plan import Variation, plan, tokenizers, variations
from compgen_fast.worlds.shapes2d import Shapes2D

TINY = replace(
    plans.SCALES["quick"], size=64, probe_steps=5, tokenizer_steps=2, trunk=TrunkConfig(16, 2, 2), steps=4, every=2,
    batch_size=8, images=2, objectives=("maskgit",), jepa=((1, 2),),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("scale", plans.SCALES)
def test_every_job_of_a_plan_can_be_built(scale: plans.ScaleName) -> None:
    jobs = plan(scale, "all", Path("out"))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        check_model(job.train.model)
    for each in tokenizers(scale, Path("out")):
        check_model(each.train.model)


def test_parts_share_their_runs_and_only_jepa_s_first_layers_are_repeated() -> None:
    everything = {job.name for job in plan("cpu", "all", Path("out"))}
    assert {job.name for part in ("objectives", "conditioning", "jepa", "circuits")
            for job in plan("cpu", part, Path("out"))} == everything  # fmt: skip
    compared = [Variation("maskgit", jepa=layers) for layers in ((), (7, 9, 11), (6,))]
    runs = [job.variation for job in plan("cpu", "all", Path("out"))]
    assert [runs.count(each) for each in compared] == [3, 3, 1]
    ablated = {job.variation for job in plan("cpu", "all", Path("out")) if job.ablated}
    assert ablated == set(variations(plans.SCALES["cpu"], "circuits"))


def test_what_differs_between_jobs_is_the_variation_alone() -> None:
    plain, with_jepa = (
        next(
            job.train for job in plan("cpu", "jepa", Path("out")) if job.variation == Variation("maskgit", jepa=layers)
        )
        for layers in ((), (7, 9, 11))
    )
    assert isinstance(with_jepa.model, MaskGITConfig) and with_jepa.model.jepa == JepaConfig(rate_steps=4_000)
    assert replace(with_jepa, model=replace(with_jepa.model, jepa=None), out=plain.out) == plain


def test_unseen_images_come_composition_by_composition() -> None:
    config = tokenizers("quick", Path("out"))[0].train
    images, factors = prepare.unseen_images(config, 3)
    assert images.shape == (24, 32, 32, 3)
    found = Shapes2D(resolution=32, continuous=True).composition({k: v.numpy() for k, v in factors.items()})
    assert [f"{number:03b}" for number in found[:4]] == [*COMPOSITIONS[:4]]
    assert sorted(f"{number:03b}" for number in found) == sorted(3 * COMPOSITIONS)


# ------------------------------------------------------------------------------------------------ circuits


class Drawn(nn.Module):
    """Two layers of two heads. Head 2 of layer 1 draws the first factor alone, group 3 of layer 2 the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.heads = 2
        self.trunk.blocks = nn.ModuleList(Block(8, 2) for _ in range(2))
        for block in self.trunk.blocks:
            nn.init.ones_(block.proj.weight)
            nn.init.ones_(block.fc2.weight)

    def margins(self) -> Tensor:
        head = self.trunk.blocks[0].proj.weight[0, 4:].mean()
        group = self.trunk.blocks[1].fc2.weight[0, 8:12].mean()
        return torch.stack([head * group, group, torch.ones(())]).detach().expand(6, 3) * 40


def test_the_effect_of_a_unit_is_the_margin_that_is_lost_without_it() -> None:
    asked = torch.ones(6, 3, dtype=torch.bool)
    probes = type("P", (), {"sides": lambda *_: asked, "__call__": lambda _, x: x})()
    asking = SimpleNamespace(images=lambda model: model.margins(), factors={}, probes=probes)
    model = Drawn()
    found = circuits.effects(model, asking)  # type: ignore[arg-type]
    expected = torch.zeros(2, 2 + circuits.GROUPS, 3)
    expected[0, 1, 0] = expected[1, 2 + 2, 0] = expected[1, 2 + 2, 1] = 1
    torch.testing.assert_close(torch.tensor(found["effects"]), expected, atol=1e-6, rtol=0)
    assert found["mattering"] == [1, 1] and found["mattering_heads"] == [1, 0] and found["polysemantic"] == [0, 1]
    assert found["right"] == 1 and found["right_without_attention"] == 0
    assert (model.margins() == 40).all()  # nothing is left out any more


def test_circuits_overlap_as_much_as_they_share_units() -> None:
    effects = torch.zeros(2, 4, 3)
    effects[0, :2, 0] = effects[0, :2, 1] = effects[1, :2, 2] = 0.5
    found = circuits.summary(effects, torch.zeros_like(effects), heads=2)
    assert found["overlaps"] == [1, 0, 0] and found["overlap"] == pytest.approx(1 / 3)
    noisy = circuits.summary(effects, torch.full_like(effects, 0.2), heads=2)
    assert sum(noisy["mattering"]) == 0  # an effect below three standard errors may be chance


# ------------------------------------------------------------------------------------------------ claims


def run(
    objective: str, seed: int, level_2: Sequence[float], told: str = "full", jepa: Sequence[int] = ()
) -> dict[str, Any]:
    """A run that makes all seen compositions; level 1 rises, then falls at the last point."""
    shares = [0.5, 0.9, *[0.7] * len(level_2)]
    curve = [
        {"step": 10 * (n + 1), "compositions": dict.fromkeys(COMPOSITIONS[:4], 1.0)
         | dict.fromkeys(COMPOSITIONS[4:7], shares[n]) | {"111": share}, "factors": {}}
        for n, share in enumerate(level_2)
    ]  # fmt: skip
    return {"name": objective, "objective": objective, "told": told, "jepa": [*jepa], "seed": seed, "curve": curve,
            "seconds": 1.0}  # fmt: skip


def test_claims_hold_by_more_than_the_spread_or_not_at_all() -> None:
    runs = [run("maskgit", 0, [0.1]), run("maskgit", 1, [0.3]), run("dit-vae", 0, [0.9]), run("dit-vae", 1, [0.8])]
    found = {each["claim"]: each["holds"] for each in claims(runs)}
    assert found == {
        "every generator makes at least 95 % of seen compositions": True,
        "DiT, VAE latents beats MaskGIT on level 2 by more than the spread": True,
    }
    runs[2:] = [run("dit-vae", 0, [0.6]), run("dit-vae", 1, [0.1])]
    assert [each["holds"] for each in claims(runs)] == [True, False]


def test_the_best_step_is_chosen_by_level_1_and_not_by_level_2() -> None:
    one = run("maskgit", 0, [1.0, 0.2, 0.9])
    assert best(one)["step"] == 20 and level(best(one), ("111",)) == 0.2
    (claim,) = (
        each for each in claims([one, run("maskgit", 0, [0.0, 0.3, 0.0], jepa=(7, 9, 11))]) if "JEPA" in each["claim"]
    )
    assert claim["holds"] and claim["evidence"] == "30.0 against 20.0"


# ------------------------------------------------------------------------------------------------ the whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("generation") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plans.SCALES, "quick", TINY)
        assert study.run("quick", "jepa", out, workers=2) == 0
        yield out


def test_the_study_leaves_results_a_page_and_a_picture(finished: Path) -> None:
    assert {"results.json", "pictures.npz", "report.html", "report.png"} <= {path.name for path in finished.iterdir()}
    results = report.read_results(finished)
    assert [each["tokenizer"] for each in results["tokenizers"]] == ["vae", "vq"]
    for each in results["runs"]:
        assert [point["step"] for point in each["curve"]] == [2, 4]
        assert set(each["curve"][-1]["compositions"]) == set(COMPOSITIONS)
        assert np.array(each["circuits"]["effects"]).shape == (2, 2 + circuits.GROUPS, 3)
    with np.load(finished / "pictures.npz") as pictures:
        assert pictures["maskgit-full-seed0"].shape == (8, 2, 32, 32, 3)


def test_a_finished_study_is_not_run_again(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plans.SCALES, "quick", TINY)
    monkeypatch.setattr(queue, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("a job was run again"))
    told = report.read_results(finished)
    assert study.run("quick", "circuits", finished) == 0
    assert report.read_results(finished)["job_seconds"] == told["job_seconds"]


def test_no_workers_are_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "generation", "--workers", "0"]) == 2
    assert "--workers is 0" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_large_scale_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "generation", "--scale", "gpu"]) == 2
    assert "cgf env" in capsys.readouterr().err


def test_the_record_checked_in_is_what_the_page_reads() -> None:
    results = json.loads((Path(__file__).parents[2] / "results" / "generation" / "results.json").read_text())
    assert results["scale"] == "cpu" and len(results["seeds"]) >= 2
    assert claims(results["runs"]) == results["claims"]
