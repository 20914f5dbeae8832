"""Files are whole or not there."""

from pathlib import Path

import pytest

from compgen_fast.files import whole_file, write_whole


def test_a_file_takes_the_place_of_the_former_one_only_when_all_of_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("former")
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "former"
    assert path.read_text() == "new"
    write_whole(path, "newest")
    assert path.read_text() == "newest" and [*tmp_path.iterdir()] == [path]


def test_a_file_that_fails_half_way_leaves_the_former_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("former")

    def fill_the_disk() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("ne")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fill_the_disk()
    assert path.read_text() == "former" and [*tmp_path.iterdir()] == [path]
