"""The manifest keeps what it is told, and stays what it was where it is told nothing new."""

import dataclasses
import json
from pathlib import Path

from compgen_fast.stream.manifest import Manifest, Schema, Shard, parse
from tests.stream.stub import packed

PLAIN = Manifest("n", "s", Schema("png", 4, 4, (), False, ()), (Shard("shard-000000.tar", 1, 2, "a", "b"),))


def test_a_manifest_of_before_there_was_made_keeps_its_hash() -> None:
    assert PLAIN.hash == "0226b089e4d5c1fe5ee2b6434b2b7cdb8996ca55e3c726eb94c9e6c9d31f9dba"
    assert "made" not in json.loads(PLAIN.to_json())
    assert parse(PLAIN.to_json(), "here") == PLAIN


def test_how_images_were_made_is_kept_and_hashed() -> None:
    made = dataclasses.replace(PLAIN, made="centre crop")
    assert parse(made.to_json(), "here") == made
    assert made.hash != PLAIN.hash


def test_a_plan_of_before_is_gone_on_with(tmp_path: Path) -> None:
    packed(tmp_path)
    assert list(json.loads((tmp_path / "plan.json").read_text())) == [
        "name", "split", "samples", "shard_size", "schema", "probe",
    ]  # fmt: skip
