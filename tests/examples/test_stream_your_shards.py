"""Two ranks' shares and an exact resume, on images of the example's own and on a folder that is given."""

from pathlib import Path

import pytest
from PIL import Image

from tests.examples.scripts import printed_by

DUE = "resumed behind sample 48 on one rank: the next batch is the one that was due"


def test_what_two_ranks_left_off_goes_on_on_one() -> None:
    assert printed_by("stream_your_shards.py").splitlines()[-1] == DUE


def test_a_folder_of_yours_is_packed_beside_it(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(70):
        Image.new("RGB", (20, 30), (number, 0, 0)).save(photos / f"{number}.png")
    (photos / "factors.csv").write_text("\n".join(["filename,red", *(f"{n}.png,{n}" for n in range(70))]))
    assert printed_by("stream_your_shards.py", photos).splitlines()[0] == "70 images packed with their red"
    assert (tmp_path / "photos.shards" / "manifest.json").exists()


def test_a_resume_that_lost_its_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compgen_fast.stream.ShardStream.load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        printed_by("stream_your_shards.py")
