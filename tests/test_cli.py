"""The command line: quick to answer, one sentence for a mistake, and nothing hidden."""

import itertools
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import compgen_fast
from compgen_fast import cli


def cgf(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compgen_fast", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def bench_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Put a recorder in the place of the slots suite; its exit code is 7."""
    calls: list[dict[str, object]] = []

    def run(**options: object) -> int:
        calls.append(options)
        return 7

    monkeypatch.setitem(sys.modules, "compgen_fast.bench.slots", SimpleNamespace(run=run))
    return calls


def test_help_answers_without_importing_torch() -> None:
    program = (
        "import sys\nfrom compgen_fast.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('torch imported:', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "bench" in done.stdout
    assert "torch imported: False" in done.stdout, done.stderr


@pytest.mark.parametrize("start", [["-m", "compgen_fast"], [str(Path(sys.executable).with_name("cgf"))]])
def test_the_version_is_told(start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"compgen-fast {compgen_fast.__version__}\n")


def test_the_command_has_a_name_that_no_shell_builtin_wins_over() -> None:
    scripts = {
        script.name for script in entry_points(group="console_scripts") if script.value.startswith("compgen_fast.")
    }
    assert scripts == {"cgf", "compgen-fast"}
    bash = shutil.which("bash")
    assert bash is not None
    builtin = subprocess.run(
        [bash, "-c", "type -t cgf compgen-fast"], env={"PATH": ""}, capture_output=True, check=False
    )
    assert builtin.stdout == b""


def test_a_reader_that_goes_away_is_no_fault() -> None:
    command = [sys.executable, "-m", "compgen_fast", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_advice_for_a_misspelt_option_is_about_the_command_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "frame_vae_cpu", "--stpes", "3"])
    shown = capsys.readouterr().err
    assert exit_.value.code == 2 and "--steps" in shown and "dit_cpu" not in shown


def test_bench_hands_its_options_over_and_returns_the_exit_code(bench_calls: list[dict[str, object]]) -> None:
    assert cli.main(["bench", "slots", "--quick", "--threads", "2", "--json", "-"]) == 7
    assert bench_calls == [{"quick": True, "threads": 2, "json": "-", "device": "cpu"}]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "env"),
        (["bench", "nothing"], "nothing"),
        (["bench", "slots", "--threads", "many"], "--threads"),
        (["bench", "slots", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_syntax_exits_2_and_names_the_culprit(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--threads", "0"], "--threads is 0; it must be at least 1"),
        (["--json", "/no/such/folder/rows.json"], "/no/such/folder does not exist"),
    ],
)
def test_an_impossible_request_is_one_sentence_and_exit_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str], bench_calls: list[dict[str, object]]
) -> None:
    assert cli.main(["bench", "slots", *options]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert bench_calls == []


def test_cuda_is_refused_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bench_calls: list[dict[str, object]]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "slots", "--device", "cuda"]) == 2
    assert "sees no CUDA or ROCm device" in capsys.readouterr().err
    assert bench_calls == []


def test_an_unknown_backend_in_the_environment_is_refused_without_a_traceback() -> None:
    done = cgf("env", COMPGEN_BACKEND="abacus")
    assert done.returncode == 2
    assert "abacus" in done.stderr
    assert done.stderr.count("\n") == 1


def test_interrupting_exits_130_and_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: cli.Env) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Env, "run", interrupted)
    assert cli.main(["env"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: cli.Env) -> int:
        raise ValueError("not the user's fault")

    monkeypatch.setattr(cli.Env, "run", broken)
    with pytest.raises(ValueError, match="not the user's fault"):
        cli.main(["env"])


def test_a_world_is_drawn_packed_verified_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, shards = tmp_path / "world.png", tmp_path / "shards"
    assert cli.main(["world", "show", "shapes2d", "--resolution", "16", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    size = ["--size", "20", "--shard-size", "8", "--resolution", "16"]
    assert cli.main(["pack", "scenes", str(shards), *size, "--split", "texture", "--part", "ood"]) == 0
    assert "20 samples, 3 shards" in capsys.readouterr().out
    assert cli.main(["verify", str(shards)]) == 0
    assert cli.main(["inspect", str(shards), "--picture", str(picture)]) == 0
    assert "scenes-texture-ood" in capsys.readouterr().out
    first = shards / "shard-000000.tar"
    first.write_bytes(first.read_bytes()[:-2000])
    assert cli.main(["verify", str(shards)]) == 1
    assert "shard-000000.tar" in capsys.readouterr().out


def test_a_folder_is_packed_by_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    lines = ["filename,shape,ground"]
    for number, (shape, ground) in enumerate(itertools.product("abc", "xyz")):
        Image.new("RGB", (20, 16), (number, 0, 0)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{shape},{ground}")
    (folder / "factors.csv").write_text("\n".join(lines))
    command = ["pack", str(folder), str(tmp_path / "out"), "--adapter", "images", "--resolution", "16"]
    assert cli.main([*command, "--hold-out", "shape", "ground", "--part", "ood"]) == 0
    assert "3 samples, 1 shards" in capsys.readouterr().out
    assert cli.main([*command, "--hold-out", "shape", "ground", "--part", "level1"]) == 2
    assert "--part is 'level1'; with --hold-out it is one of train, validation, test, ood" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pack", "nowhere", "out"], "there is no world or folder 'nowhere'; expected one of scenes"),
        (["pack", "no/folder", "out", "--adapter", "clevr"], "there is no such folder; CLEVR is expected as"),
        (["world", "show", "scenes", "--split", "mood"], "there is no split 'mood'; expected one of background"),
        (["world", "show", "scenes", "--options", "objects"], "--options objects: expected name=value"),
        (["world", "show", "scenes", "--options", "legs=4"], "scenes: there is no option 'legs'"),
        (["frobnicate"], "there is no command 'frobnicate'; expected one of env, world, pack"),
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["train", "slot_vea_cpu"], "there is no recipe 'slot_vea_cpu'; did you mean slot_vae_cpu"),
        (["inspect", "no/folder"], "expected a folder made by `cgf pack`"),
    ],
)
def test_data_that_cannot_be_had_is_a_sentence_and_exit_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.out == ""
