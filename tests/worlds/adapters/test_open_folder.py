import gc
import pickle
from pathlib import Path

import numpy as np
import pytest

from compgen_fast.worlds.adapters import ADAPTERS, FolderError, View, open_folder, taken
from tests.worlds.adapters.folders import noise, write_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "factors.csv").write_text("filename,size\n0.png,1\n1.png,2\n")
    for seed in range(2):
        write_image(tmp_path / f"{seed}.png", noise(seed))
    return tmp_path


def test_a_folder_opens_by_the_adapters_name(folder: Path) -> None:
    source = open_folder("images", folder, resolution=4, part=None)
    assert source.samples(np.array([0, 1])).images.shape == (2, 4, 4, 3)
    assert source.samples(np.array([], np.int64)).images.shape == (0, 4, 4, 3)


def test_unknown_adapters_and_options_are_refused_with_what_there_is(folder: Path) -> None:
    with pytest.raises(ValueError, match="there is no adapter 'imagenet'; expected one of images, pug-spar"):
        open_folder("imagenet", folder)
    with pytest.raises(ValueError, match="celeba has no option 'stride'; expected one of resolution, part"):
        open_folder("celeba", folder, stride=2)


def test_values_of_another_kind_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="images: unlisted is 'no'; expected true or false"):
        open_folder("images", folder, unlisted="no")
    with pytest.raises(ValueError, match=r"images: categories is 'size'; expected a list, such as \["):
        open_folder("images", folder, categories="size")
    with pytest.raises(ValueError, match="fit is 'stretch'; expected crop or pad"):
        open_folder("images", folder, fit="stretch")


def test_all_that_read_image_files_take_fit(folder: Path) -> None:
    assert [name for name in ADAPTERS if "fit" not in taken(name)] == ["shapes3d"]
    write_image(folder / "0.png", np.full((4, 8, 3), 255, np.uint8))
    padded = open_folder("images", folder, resolution=8, fit="pad")
    assert padded.samples(np.array([0])).images[0].any((1, 2)).tolist() == [False] * 2 + [True] * 4 + [False] * 2
    assert padded.made != open_folder("images", folder).made == View("some", open_folder("images", folder), [0]).made


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_names_a_missing_folder_and_shows_its_layout(name: str, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"there is no such folder; .* is expected as\n  \S+/\n    \S"):
        open_folder(name, tmp_path / "nowhere", resolution=8)


def test_a_source_can_be_sent_to_another_process(folder: Path) -> None:
    sent = pickle.loads(pickle.dumps(open_folder("images", folder, resolution=8)))
    np.testing.assert_array_equal(sent.samples(np.array([1])).images[0], noise(1))


def test_numbers_that_no_sample_has_are_refused(folder: Path) -> None:
    source = open_folder("images", folder)
    with pytest.raises(IndexError, match="asked for samples -1 to 2; there are 2, from 0"):
        source.samples(np.array([2, -1]))


def test_a_resolution_of_no_pixels_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="resolution is 0; expected at least 1 pixel"):
        open_folder("images", folder, resolution=0)


def test_opening_leaves_the_garbage_collector_as_it_was(folder: Path) -> None:
    open_folder("images", folder)
    with pytest.raises(FolderError):
        open_folder("images", folder / "nowhere")
    assert gc.isenabled()
    gc.disable()
    open_folder("images", folder)
    running = gc.isenabled()
    gc.enable()
    assert not running
