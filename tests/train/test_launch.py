"""Launching: who started this process, the supervisor of ranks on one machine, and the command for several machines."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from compgen_fast.exits import STOPS, Exit
from compgen_fast.train import launch
from compgen_fast.train.engine import imported
from compgen_fast.train.launch import (
    Placement,
    first_host,
    hosts_command,
    placed,
    read_hostfile,
    run_hosts,
    run_ranks,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29501"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[03-07,9]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


# Who started this process.


def test_torchrun_and_deepspeed_say_everything() -> None:
    assert placed(TORCHRUN) == Placement(rank=3, size=8, local=1, master="node1", port=29501)


def test_srun_says_who_and_the_first_host_is_where_all_meet() -> None:
    found = placed(SLURM)
    assert (found.rank, found.size, found.local, found.master) == (5, 8, 1, "node03")


def test_ranks_of_a_slurm_step_agree_on_a_port_and_other_steps_have_another() -> None:
    ports = [placed(SLURM | {"SLURM_PROCID": rank}).port for rank in ("1", "5")]
    assert ports[0] == ports[1] != placed(SLURM | {"SLURM_STEP_ID": "1"}).port
    assert 1024 < ports[0] < 32_768


def test_a_slurm_step_on_one_machine_needs_no_name_lookup() -> None:
    assert placed(SLURM | {"SLURM_STEP_NODELIST": "node03"}).master == "127.0.0.1"


def test_what_a_slurm_script_exports_is_respected() -> None:
    found = placed(SLURM | {"MASTER_ADDR": "ib-node03", "MASTER_PORT": "6000", "WORLD_SIZE": "8"})
    assert (found.master, found.port) == ("ib-node03", 6000)


def test_a_batch_script_without_srun_is_one_process() -> None:
    assert placed(without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_ID") | {"SLURM_PROCID": "0"}).size == 1


def test_a_shell_inside_an_allocation_counts_its_step_not_the_allocation() -> None:
    shell = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert placed(shell).size == 1


def test_mpirun_on_one_machine_needs_nothing_more() -> None:
    found = placed(MPI)
    assert (found.rank, found.size, found.local, found.master) == (2, 4, 2, "127.0.0.1")


def test_mpirun_carried_by_srun_counts_not_the_srun() -> None:
    assert placed(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | MPI).rank == 2


def test_mpirun_on_several_machines_is_asked_where_rank_0_is() -> None:
    several = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match="-x MASTER_ADDR"):
        placed(several)
    assert placed(several | {"MASTER_ADDR": "node1"}).master == "node1"


def test_torchrun_inside_srun_counts_the_innermost() -> None:
    assert placed(SLURM | TORCHRUN) == placed(TORCHRUN)


def test_a_process_that_nobody_launched_is_alone_on_a_free_port() -> None:
    found = placed({})
    assert (found.rank, found.size, found.local, found.master) == (0, 1, 0, "127.0.0.1") and found.port > 1023


def test_placement_exports_what_torch_reads() -> None:
    environment: dict[str, str] = {}
    placed(TORCHRUN).export(environment)
    assert environment == TORCHRUN


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "RANK=3, LOCAL_RANK=1 but not WORLD_SIZE"),
        (without(TORCHRUN, "RANK"), "but not RANK"),
        ({"LOCAL_RANK": "0"}, "but not RANK and WORLD_SIZE"),
        (without(TORCHRUN, "MASTER_PORT"), "but not MASTER_PORT"),
        (TORCHRUN | {"RANK": "8"}, "contradict each other"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "contradict each other"),
        (TORCHRUN | {"RANK": "three"}, "RANK=three.*whole numbers"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (without(SLURM, "SLURM_LOCALID"), "but not SLURM_LOCALID; srun sets all three"),
        (SLURM | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4 but srun started 8 processes"),
        (without(MPI, "OMPI_COMM_WORLD_RANK"), "but not OMPI_COMM_WORLD_RANK"),
    ],
)
def test_a_half_set_or_contradictory_environment_is_refused_in_a_sentence(
    environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        placed(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[03-07,9]", "node03"),
        ("node[9,03-07],big1", "node9"),
        ("big1,node[03-07]", "big1"),
        ("rack[1-2]node[05-06],x", "rack1node05"),
        ("gpu-a[001-128]-ib", "gpu-a001-ib"),
        ("node-3,node-4", "node-3"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[03", "node03]", "[]", ",node1"])
def test_a_host_list_that_is_none_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="expected hosts such as"):
        first_host(nodes)


# The supervisor. Its ranks are small programs without torch.


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """A command for each rank: the script, with rank, ``here`` (a folder) and ``note`` (a file of its own) at hand."""

    def write(script: str) -> list[str]:
        head = f"""
            import os, signal, sys, time
            from pathlib import Path
            rank, here = int(os.environ["RANK"]), Path({str(tmp_path)!r})
            def note(name, text=""):
                (here / ("." + name + str(rank))).write_text(text)
                (here / ("." + name + str(rank))).rename(here / (name + str(rank)))
            note("process", str(os.getpid()))
        """
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(script))
        return [sys.executable, "-S", str(path)]

    return write


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LEAVE_SECONDS", 0.5)
    monkeypatch.setattr(launch, "KILL_SECONDS", 0.5)


def processes(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("process*"))]


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(reached: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not reached() and time.monotonic() < until:
        time.sleep(0.02)
    return reached()


def when(reached: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    """Does something beside the test as soon as it may."""
    thread = threading.Thread(target=lambda: then() if soon(reached) else None, daemon=True)
    thread.start()
    return thread


def test_each_rank_finds_its_place_in_its_environment(
    program: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = program('note("seen", "\\n".join(f"{name}={value}" for name, value in os.environ.items()))')
    assert run_ranks(command, 3) == 0
    seen = [
        dict(line.split("=", 1) for line in (tmp_path / f"seen{rank}").read_text().splitlines()) for rank in range(3)
    ]
    assert [placed(environment).rank for environment in seen] == [0, 1, 2]
    assert {placed(environment).size for environment in seen} == {3}
    assert len({environment["MASTER_PORT"] for environment in seen}) == 1
    assert all(environment["LOCAL_WORLD_SIZE"] == "3" for environment in seen)
    assert seen[0]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))


def test_the_users_thread_count_is_kept(
    program: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_ranks(program('note("seen", os.environ["OMP_NUM_THREADS"])'), 1) == 0
    assert (tmp_path / "seen0").read_text() == "7"


@pytest.mark.parametrize(
    ("end", "words", "code"),
    [
        ("sys.exit(3)", "exited with code 3", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", 137),
    ],
)
@pytest.mark.usefixtures("hurried")
def test_a_rank_that_fails_is_named_and_the_others_are_ended(
    program: Callable[[str], list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    end: str,
    words: str,
    code: int,
) -> None:
    script = f"""
        while not (here / "process0").exists():
            time.sleep(0.01)
        if rank == 1:
            {end}
        time.sleep(30)
        note("outlived")
    """
    assert run_ranks(program(script), 2) == code
    assert not (tmp_path / "outlived0").exists()
    failed, other = processes(tmp_path)[1], processes(tmp_path)[0]
    assert f"cgf: rank 1 (process {failed}) {words}; the other ranks are being ended" in capfd.readouterr().err
    assert not running(other)


@pytest.mark.usefixtures("hurried")
def test_a_rank_that_does_not_want_to_end_is_killed(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    script = """
        signal.signal(signal.SIGTERM, lambda *_: note("term"))
        note("ready")
        while rank == 0:
            time.sleep(0.1)
        while not (here / "ready0").exists():
            time.sleep(0.01)
        sys.exit(1)
    """
    assert run_ranks(program(script), 2) == 1
    assert (tmp_path / "term0").exists() and not running(processes(tmp_path)[0])


def test_ranks_that_found_a_stalled_one_themselves_are_not_blamed(
    program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(program(f"os._exit({Exit.STALLED})"), 2) == Exit.STALLED
    assert "cgf" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, Exit.TERMINATED),
        (signal.SIGINT, Exit.TERMINATED),  # a rank may have seen only the SIGTERM that comes with it
        (signal.SIGINT, Exit.INTERRUPTED),
        (signal.SIGUSR1, Exit.REQUEUE),
        (signal.SIGUSR1, Exit.DONE),  # all its steps were done
    ],
)
def test_a_signal_reaches_each_rank_once_and_all_may_save_and_end_with_its_code(
    program: Callable[[str], list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: Exit,
) -> None:
    script = f"""
        taken = []
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, lambda number, _: taken.append(number))
        note("ready")
        for _ in range(6000):
            time.sleep(0 if taken else 0.01)
        time.sleep(0.3)  # saving
        note("saved", str(taken.count({int(number)})))
        sys.exit({int(code)})
    """
    beside = when(
        lambda: len(list(tmp_path.glob("ready*"))) == 2,
        lambda: os.kill(os.getpid(), number),
    )
    assert run_ranks(program(script), 2) == (STOPS[number] if code else 0)
    beside.join()
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", STOPS)
def test_ranks_that_cannot_save_yet_end_at_once_without_a_word(
    program: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    beside = when(lambda: len(processes(tmp_path)) == 2, lambda: os.kill(os.getpid(), number))
    assert run_ranks(program("time.sleep(20)"), 2) == STOPS[number]
    beside.join()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("code", STOPS.values())
def test_ranks_that_were_asked_by_others_to_stop_are_not_blamed(
    program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str], code: Exit
) -> None:
    assert run_ranks(program(f"sys.exit({int(code)})"), 2) == code
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_ends_ranks_that_are_saving(
    program: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ECHO_SECONDS", 0.0)
    script = """
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, _: note("taken"))
        note("ready")
        while True:
            time.sleep(0.01)
    """
    first = when(lambda: len(list(tmp_path.glob("ready*"))) == 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    second = when(lambda: len(list(tmp_path.glob("taken*"))) == 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run_ranks(program(script), 2) == Exit.INTERRUPTED
    first.join()
    second.join()
    assert not any(running(process) for process in processes(tmp_path))


def test_the_supervisors_own_handlers_are_put_back(program: Callable[[str], list[str]]) -> None:
    before = [signal.getsignal(number) for number in STOPS]
    run_ranks(program(""), 1)
    assert [signal.getsignal(number) for number in STOPS] == before


def test_what_other_ranks_print_comes_whole_and_with_their_number(
    program: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = """
        if rank:
            for line in range(3000):
                print(f"line {line} " + "x" * 50)
            print("an error", file=sys.stderr)
            os.write(1, b"no end of line")
            os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else None
        else:
            print("from rank 0")
    """
    run_ranks(program(script), 3)
    captured = capfd.readouterr()
    assert captured.out == "from rank 0\n"
    lines = [line for line in captured.err.splitlines() if not line.startswith("cgf")]
    for rank in (1, 2):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own[:3000] == [f"[rank {rank}] line {line} {'x' * 50}" for line in range(3000)]
        assert own[3000:] == [f"[rank {rank}] an error", f"[rank {rank}] no end of line"]
    assert len(lines) == 2 * 3002


def test_what_was_printed_last_is_passed_on_before_the_supervisor_returns(
    program: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on = []

    def slowly(line: bytes) -> None:
        time.sleep(0.005)
        passed_on.append(line)

    monkeypatch.setattr(launch, "_write", slowly)
    assert run_ranks(program("for line in range(100 if rank else 0):\n    print(line)"), 2) == 0
    assert passed_on == [b"[rank 1] %d\n" % line for line in range(100)]


def test_what_a_rank_has_started_ends_with_it(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    script = """
        import subprocess
        child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        note("child", str(child.pid))
    """
    assert run_ranks(program(script), 1) == 0
    assert soon(lambda: not running(int((tmp_path / "child0").read_text())))


def test_ranks_end_when_their_supervisor_is_killed(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    command = program('signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote("ready")\ntime.sleep(600)')
    start = f"from compgen_fast.train.launch import run_ranks; run_ranks({command!r}, 2)"
    supervisor = subprocess.Popen([sys.executable, "-c", start])
    try:
        assert soon(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        assert all(running(process) for process in processes(tmp_path))
    finally:
        supervisor.kill()
        supervisor.wait()
    assert soon(lambda: not any(running(process) for process in processes(tmp_path)))


def test_no_ranks_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="--nproc is 0"):
        run_ranks(["true"], 0)


def test_a_command_that_does_not_exist_leaves_nothing_behind() -> None:
    before = [signal.getsignal(number) for number in STOPS]
    with pytest.raises(FileNotFoundError):
        run_ranks(["no such command"], 2)
    assert [signal.getsignal(number) for number in STOPS] == before


def test_torchrun_starts_ranks_that_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            from pathlib import Path
            from compgen_fast.train.launch import placed
            from compgen_fast.train.ranks import joined
            from compgen_fast.train.watch import Watch
            placement = placed(os.environ)
            placement.export()
            with joined("cpu") as ranks, Watch(ranks) as watch:
                watch.beat("forward", 0)
                (Path({str(tmp_path)!r}) / f"found{{ranks.rank}}").write_text(str(ranks.gather(placement.local)))
            """
        )
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    finished = subprocess.run(torchrun, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert [(tmp_path / f"found{rank}").read_text() for rank in range(2)] == ["[0, 1]", "[0, 1]"]


def test_torchrun_does_not_start_ranks_anew_that_were_asked_to_stop(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            from pathlib import Path
            from compgen_fast.exits import Exit
            from compgen_fast.train.ranks import joined, leave
            with joined("cpu") as ranks:
                with (Path({str(tmp_path)!r}) / f"started{{ranks.rank}}").open("a") as file:
                    file.write("once")
                leave(ranks, Exit.TERMINATED)
            """
        )
    )
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    finished = subprocess.run(torchrun, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 1, finished.stderr
    assert [(tmp_path / f"started{rank}").read_text() for rank in range(2)] == ["once", "once"]


# Several machines. Nothing is started here.


def hosts(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_gives_processes_by_host(tmp_path: Path) -> None:
    text = "# two machines\nnode1 slots=8\n\nuser@node2   slots=4  # the old one\n"
    assert read_hostfile(hosts(tmp_path, text)) == {"node1": 8, "user@node2": 4}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node1 slots=8\nnode2\n", "line 2: 'node2'; expected `host slots=N`"),
        ("node1 slots=8x", "line 1"),
        ("node1 slots=0", "line 1: .* of 1 or more"),
        ("node1 slots=4 node2 slots=4", "line 1"),
        ("node1 slots=4\n# and\nnode1 slots=2", "line 3: node1 is there already"),
        ("# nothing\n", "no hosts"),
    ],
)
def test_a_hostfile_that_is_wrong_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_hostfile(hosts(tmp_path, text))


def test_a_hostfile_that_is_not_there_does_not_mean_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        hosts_command(tmp_path / "hosts", ["train"])


AWKWARD = ["train", "--out", "a b", "x=$HOME", "it's", 'say "hi" now', "a\\b c", "*", "", "`id`", "$(id) x", "a;b", "é"]


def test_deepspeeds_launcher_understands_the_command(tmp_path: Path) -> None:
    imported(torch.device("cpu"))
    from deepspeed.launcher.runner import parse_args

    path = hosts(tmp_path, "node1 slots=2\nnode2 slots=2")
    command = hosts_command(path, AWKWARD)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    understood = parse_args(command[3:])
    assert understood.hostfile == str(path) and understood.user_script == "compgen_fast"
    assert understood.module and understood.no_local_rank and understood.force_multi and not understood.no_python


def test_arguments_arrive_on_other_machines_as_they_were_given(tmp_path: Path) -> None:
    imported(torch.device("cpu"))
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    command = hosts_command(hosts(tmp_path, "node1 slots=2"), AWKWARD)
    remote, *_ = PDSHRunner(parse_args(command[3:]), "e30=").get_cmd({}, {"node1": [0, 1]})
    after = itertools.dropwhile(lambda word: word != "compgen_fast", remote)
    shell = " ".join([f"printf '%s\\n' {next(after)}", *after])  # as ssh does: joined by spaces, for a shell
    printed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["compgen_fast", *AWKWARD]


def test_several_machines_need_pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs pdsh"):
        run_hosts(hosts(tmp_path, "node1 slots=2"), ["train"])
