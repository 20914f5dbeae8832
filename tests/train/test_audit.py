"""The audit before the first step: passes where ranks compute what one process would, and finds a sabotaged rank."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from compgen_fast.train.audit import Audit, _checksum, _largest_error
from tests.train.two_ranks import run_two_ranks

# One start of two ranks for all cases: each is a model, an engine, an audit, and what came of it.
RANKS = """
    import json, warnings
    import torch
    from torch import nn
    from compgen_fast.draws import Draws
    from compgen_fast.train import audit as module
    from compgen_fast.train.audit import AuditFailed, audit
    from compgen_fast.train.engine import imported
    from compgen_fast.train.ranks import joined

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed = imported(torch.device("cpu"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(48, 8), nn.Linear(8, 1), nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.weight, self.reduce, self.draws_itself = 1.0, torch.mean, False

        def forward(self, images, factors, step, draws):
            self.calls += 1
            torch.rand(())  # to no effect but on the random state
            x = images.flatten(1) / 255
            noise = torch.randn_like(x) if self.draws_itself else draws.normal(x)
            y = self.b(self.a(x + 0.1 * noise).tanh()).squeeze(1)
            return {"loss": self.weight * self.reduce((y - factors["colour"]).square())}

    def start(stage, accumulation):
        torch.manual_seed(0)
        model = Model()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        settings = {
            "train_batch_size": 8 * accumulation * ranks.size,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 62,
        }
        optimiser = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=1e-2)
        return deepspeed.initialize(model=model, optimizer=optimiser, config=settings)[0]

    def batch(number):
        at = Draws.at(7, number, first=8 * ranks.rank, total=16)
        like = torch.empty(8, 4, 4, 3)
        return (at.uniform(like) * 255).to(torch.uint8), {"colour": at.normal(torch.empty(8))}

    def draws(first, total):
        return Draws.at(0, 0, first=first, total=total)

    def run_audit(engine, **changes):
        images, factors = batch(0)
        keys = [f"sample{8 * ranks.rank + i}" for i in range(8)]
        return audit(engine, ranks, **({"images": images, "factors": factors, "keys": keys, "draws": draws} | changes))

    def refusal(sabotage=lambda engine: None, stage=0, **changes):
        engine = start(stage, 1)
        sabotage(engine)
        try:
            return "passed: " + str(run_audit(engine, **changes))
        except AuditFailed as failed:
            return str(failed)

    def trained(stage, accumulation, audited):
        engine = start(stage, accumulation)
        torch.manual_seed(5)
        said = str(run_audit(engine)) if audited else ""
        for step in range(2):
            for micro in range(accumulation):
                loss = engine(*batch(step * accumulation + micro), step=step, draws=draws(8 * ranks.rank, 16))["loss"]
                engine.backward(loss)
                engine.step()
        state = {name: value.flatten().tolist() for name, value in engine.module.state_dict().items()}
        return said, [state, torch.rand(1).item(), engine.global_steps, engine.micro_steps]

    def on_rank_1(change):
        return lambda engine: change(engine) if ranks.rank == 1 else None

    def heavier(engine):
        engine.module.weight = 2.0

    def summed(engine):
        engine.module.reduce = torch.sum

    def drawing(engine):
        engine.module.draws_itself = True

    def moved(engine):
        with torch.no_grad():
            engine.module.a.weight[1, 2] += 1e-6

    def counted(engine):
        engine.module.calls += 1

    def in_bf16(engine):
        engine.module.forward = torch.autocast("cpu", torch.bfloat16)(engine.module.forward)

    def autocasts(engine):
        out = engine.module(*batch(0), step=0, draws=draws(0, 16))["loss"]
        return out.item() != Model.forward(engine.module, *batch(0), step=0, draws=draws(0, 16))["loss"].item()

    def tampered(engine):
        backward = engine.backward
        def backward_and_more(loss, **kwargs):
            backward(loss, **kwargs)
            engine.module.b.bias.grad += 1e-6
        engine.backward = backward_and_more

    with joined("cpu") as ranks:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        found = {}
        for stage in (0, 1, 2):
            for accumulation in (1, 2):
                said, audited = trained(stage, accumulation, audited=True)
                _, plain = trained(stage, accumulation, audited=False)
                found[f"passes {stage} {accumulation}"] = said, audited == plain
            found[f"heavier {stage}"] = refusal(on_rank_1(heavier), stage)
            found[f"summed {stage}"] = refusal(summed, stage)
        engine = start(0, 1)
        in_bf16(engine)
        found["in bf16"] = str(run_audit(engine)), autocasts(engine)
        found["drawing"] = refusal(drawing)
        found["moved"] = refusal(on_rank_1(moved))
        found["counted"] = refusal(on_rank_1(counted))
        found["tampered"] = refusal(on_rank_1(tampered))
        found["same samples"] = refusal(keys=["x", "y"] if ranks.rank else ["y", "z"])
        installed = module.installed_version
        if ranks.rank == 1:
            module.installed_version = lambda package: "9.9" if package == "triton" else installed(package)
        found["software"] = refusal()
        module.installed_version = installed
        from compgen_fast.kernels import launch
        if ranks.rank == 1:
            launch.configurations()["sm_80"]["hash"] = "another"
        found["configurations"] = refusal()
        print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> list[Mapping[str, Any]]:
    """What each of two ranks found."""
    return [json.loads(printed.splitlines()[-1]) for printed in run_two_ranks(RANKS)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_compute_what_one_process_would_pass(
    found: list[Mapping[str, Any]], stage: int, accumulation: int
) -> None:
    for rank in found:
        said, _ = rank[f"passes {stage} {accumulation}"]
        assert said.startswith("audit: 2 ranks agree on 6 parameters and 16 distinct samples; gradients are those of")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training_after_an_audit_is_training_without_one_to_the_last_bit(
    found: list[Mapping[str, Any]], stage: int, accumulation: int
) -> None:
    for rank in found:
        assert rank[f"passes {stage} {accumulation}"][1]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("sabotage", ["heavier", "summed"])
def test_a_loss_that_is_normalised_otherwise_is_found(
    found: list[Mapping[str, Any]], sabotage: str, stage: int
) -> None:
    for rank in found:
        sentence = rank[f"{sabotage} {stage}"]
        assert "the gradient of parameter" in sentence and "what one process computes on the same 8 samples" in sentence


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        ("drawing", "must come from `draws`"),
        ("moved", "the parameter a.weight differs between rank 0 and rank 1"),
        ("counted", "the buffer calls differs between rank 0 and rank 1"),
        ("tampered", "the gradient of parameter b.bias differs between rank 0 and rank 1"),
        ("same samples", "ranks 0 and 1 were given the same 1 samples: y"),
        ("software", " on rank 0 and 9.9 on rank 1"),
        ("configurations", " and sm_80 another on rank 1"),
    ],
)
def test_a_sabotaged_rank_is_found_and_all_ranks_say_so(
    found: list[Mapping[str, Any]], sabotage: str, words: str
) -> None:
    for rank in found:
        assert rank[sabotage].startswith("audit: ") and words in rank[sabotage]


def test_a_model_under_autocast_is_compared_without_it_and_has_it_back(found: list[Mapping[str, Any]]) -> None:
    for rank in found:
        said, autocasts_again = rank["in bf16"]
        assert float(re.findall(r"within (\S+)", said)[0]) < 1e-6 and autocasts_again


def test_a_checksum_sees_every_bit_and_every_place() -> None:
    x = torch.arange(1000.0)
    swapped, flipped = x.clone(), x.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    flipped[999] = torch.nextafter(flipped[999], torch.tensor(torch.inf))
    assert len({_checksum(x), _checksum(swapped), _checksum(flipped)}) == 3
    assert _checksum(x) == _checksum(x.clone()) == _checksum(x.view(10, 100).t().contiguous().t())
    assert _checksum(torch.tensor(0.0)) != _checksum(torch.tensor(-0.0)) + 1


def test_rounding_where_a_gradient_is_zero_by_structure_is_no_error() -> None:
    alone = {"weight": torch.ones(100), "bias": torch.full((4,), 1e-9)}
    reduced = {"weight": torch.ones(100), "bias": torch.full((4,), -1e-9)}
    assert _largest_error(alone, reduced)[0] < 1e-5


def test_a_gradient_that_is_missing_or_not_finite_is_the_largest_error() -> None:
    alone = {"a": torch.ones(4), "b": torch.ones(4)}
    assert _largest_error(alone, {"a": torch.ones(4), "b": torch.zeros(4)})[1] == "b"
    error, worst = _largest_error(alone, {"a": torch.zeros(4), "b": torch.full((4,), torch.nan)})
    assert worst == "b" and not error <= 1.0


def test_a_gradient_where_one_process_has_none_is_an_error() -> None:
    assert _largest_error({"a": torch.ones(4)}, {"a": torch.ones(4), "b": torch.ones(4)}) == (pytest.approx(100), "b")


def test_a_passed_audit_is_told_in_a_line() -> None:
    line = str(Audit(ranks=8, parameters=45, samples=64, error=3.1e-7, worst="decoder.weight"))
    assert line == (
        "audit: 8 ranks agree on 45 parameters and 64 distinct samples; gradients are those of one process within "
        "3.1e-07 (decoder.weight)"
    )
