"""The plan of the perception study: which jobs there are, and what they differ in."""

from dataclasses import replace
from pathlib import Path

import pytest

from compgen_fast.models.build import check as check_model
from compgen_fast.models.config import ReplayConfig, SlotVAEConfig, SupervisedConfig
from compgen_fast.settings import from_json, to_json
from compgen_fast.studies.perception.plan import DECODERS, SCALES, Job, plan
from compgen_fast.train.config import check

OUT = Path("out")


def named(jobs: list[Job]) -> dict[str, Job]:
    return {job.name: job for job in jobs}


@pytest.mark.parametrize("split", ["background", "texture", "object"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_job_is_one_that_the_trainer_accepts(scale, split):
    for job in plan(scale, split, 2, OUT):
        for config in (job.train, *([job.replay] if job.replay else [])):
            check(config, 1)
            check_model(config.model)


@pytest.mark.parametrize("scale", SCALES)
def test_names_and_folders_are_used_once(scale):
    jobs = plan(scale, "background", 3, OUT)
    assert len({job.name for job in jobs}) == len(jobs)
    assert len({job.train.out for job in jobs}) == len(jobs)


def test_a_job_survives_its_file():
    for job in plan("cpu", "object", 1, OUT):
        assert from_json(Job, to_json(job), "job.json") == job


def test_seeds_differ_in_the_world_and_in_the_model():
    jobs = named(plan("quick", "background", 2, OUT))
    first, second = jobs["attention-0"].train, jobs["attention-1"].train
    assert (first.seed, first.data.seed, second.seed, second.data.seed) == (0, 0, 1, 1)
    assert replace(first, seed=1, out=second.out, data=second.data) == second


def test_the_decoders_share_encoder_data_and_steps():
    jobs = named(plan("cpu", "background", 1, OUT))
    runs = [jobs[f"{name}-0"].train for name in DECODERS]
    assert len({(run.model.encoder, run.data, run.optimiser, run.steps, run.batch_size) for run in runs}) == 1


def test_the_penalised_decoders_differ_in_their_loss_alone():
    jobs = named(plan("cpu", "background", 1, OUT))
    attention, hessian = jobs["attention-0"].train.model, jobs["hessian-0"].train.model
    assert isinstance(attention, SlotVAEConfig) and isinstance(hessian, SlotVAEConfig)
    assert (attention.loss.penalty, hessian.loss.penalty) == ("attention", "hessian")
    assert replace(attention, loss=hessian.loss) == hessian


def test_unconstrained_painters_read_all_slots_and_nothing_is_penalised():
    model = named(plan("cpu", "background", 1, OUT))["unconstrained-0"].train.model
    assert isinstance(model, SlotVAEConfig)
    assert model.decoder.reads == "all" and model.loss.alpha == 0


def test_replay_begins_with_the_weights_of_its_own_model():
    for job in plan("cpu", "background", 1, OUT):
        if job.replay is not None:
            assert job.replay.start == job.train.out / "weights"
            assert isinstance(job.replay.model, ReplayConfig) and job.replay.model.vae == job.train.model
            assert job.replay.data == job.train.data


def test_supervised_encoders_name_what_the_split_asks_for():
    for split, wanted in (("texture", "texture_1"), ("object", "object_2"), ("background", "background")):
        model = named(plan("quick", split, 1, OUT))["supervised-0"].train.model
        assert isinstance(model, SupervisedConfig) and wanted in model.factors


def test_few_images_leave_a_bank_that_they_can_fill():
    job = named(plan("cpu", "background", 1, OUT))["images-4000"]
    assert job.replay is not None and isinstance(job.replay.model, ReplayConfig)
    assert job.replay.model.bank <= job.replay.data.size == job.train.data.size == 4000


def test_pretrained_vits_serve_all_encoders(tmp_path):
    for job in plan("quick", "background", 1, OUT, vit=tmp_path / "vit.safetensors"):
        assert isinstance(job.train.model, SlotVAEConfig | SupervisedConfig)
        encoder = job.train.model.encoder
        assert (encoder.kind, encoder.slots_by, encoder.weights) == ("vit", "queries", tmp_path / "vit.safetensors")
