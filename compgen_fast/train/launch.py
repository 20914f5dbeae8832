"""How the processes of a run come to be, and which of them this one is.

    cgf train --nproc 4 …            `run_ranks` starts four on this machine and looks after them
    cgf train --hostfile hosts …     `run_hosts` hands over to DeepSpeed's launcher, which starts them by ssh
    torchrun … / srun … / mpirun …       they are there already

Each process then asks `placed`, which reads what its launcher left in the environment. Making the process group is
ranks.py's work; noticing that a rank hangs is watch.py's. Nothing here imports torch, so ranks start at once.
"""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from compgen_fast.exits import STOPS, Exit

# ------------------------------------------------------------------------------------------- which process this is


@dataclass(frozen=True)
class Placement:
    """This process is ``rank`` of ``size`` and number ``local`` on its machine; they meet at ``master``:``port``."""

    rank: int
    size: int
    local: int
    master: str
    port: int

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Leaves what torch.distributed's env:// reads."""
        environment.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(self.local),
            MASTER_ADDR=self.master,
            MASTER_PORT=str(self.port),
        )


@dataclass(frozen=True)
class _Launcher:
    """Who started this process, by the variables that only it sets."""

    name: str
    rank: str
    size: str
    local: str


_TORCH = _Launcher("torchrun or deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_MPI = _Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_SLURM = _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# In an interactive step (salloc), SLURM_NTASKS is the allocation's while one shell runs; this is the step's own.
_SLURM_STEP = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def placed(environment: Mapping[str, str]) -> Placement:
    """Which process this is, from its environment. One that nobody launched is the only one of its run."""
    if _TORCH.rank in environment:  # also inside an srun: the innermost launcher counts
        rank, size, local = _numbers(_TORCH, environment)
        return Placement(rank, size, local, *_meeting_point(_TORCH, environment))
    if _MPI.rank in environment or _MPI.size in environment:  # before Slurm: mpirun may be carried by an srun
        rank, size, local = _numbers(_MPI, environment)
        _no_contradiction(_MPI, environment, size)
        return Placement(rank, size, local, *_mpi_meeting_point(environment, size))
    if "SLURM_STEP_NODELIST" in environment:  # a batch script has SLURM_PROCID too, but is no step
        launcher = _SLURM_STEP if _SLURM_STEP.size in environment else _SLURM
        rank, size, local = _numbers(launcher, environment)
        _no_contradiction(launcher, environment, size)
        return Placement(rank, size, local, *_slurm_meeting_point(environment))
    if _TORCH.size in environment or _TORCH.local in environment:
        _numbers(_TORCH, environment)  # says that RANK is missing
    return Placement(0, 1, 0, "127.0.0.1", _free_port())


def _numbers(launcher: _Launcher, environment: Mapping[str, str]) -> tuple[int, int, int]:
    names = (launcher.rank, launcher.size, launcher.local)
    found = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(
            f"the environment has {found} but not {' and '.join(missing)}; {launcher.name} sets all three. Set all of "
            "them, or unset all of them for one process"
        )
    try:
        rank, size, local = (int(environment[name]) for name in names)
    except ValueError:
        raise ValueError(f"the environment has {found}; expected whole numbers, as {launcher.name} sets them") from None
    if not 0 <= rank < size or not 0 <= local <= rank:
        raise ValueError(
            f"the environment has {found}, which contradict each other; expected 0 ≤ {launcher.rank} < {launcher.size} "
            f"and 0 ≤ {launcher.local} ≤ {launcher.rank}"
        )
    return rank, size, local


def _no_contradiction(launcher: _Launcher, environment: Mapping[str, str], size: int) -> None:
    """Scripts often export WORLD_SIZE for torch by hand."""
    said = environment.get(_TORCH.size)
    if said is not None and said != str(size):
        raise ValueError(
            f"the environment has {_TORCH.size}={said} but {launcher.name} started {size} processes "
            f"({launcher.size}); unset {_TORCH.size}"
        )


def _meeting_point(launcher: _Launcher, environment: Mapping[str, str]) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"the environment has {launcher.rank}={environment[launcher.rank]} but not {' and '.join(missing)}: where "
            "rank 0 can be reached. Start with torchrun, or set MASTER_ADDR to rank 0's host and MASTER_PORT to a port"
        )
    return environment["MASTER_ADDR"], _port(environment["MASTER_PORT"])


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ValueError(f"MASTER_PORT is {text!r}; expected a port number from 1 to 65535")
    return int(text)


def _agreed_port(environment: Mapping[str, str], *job: str) -> int:
    """A port that all processes of a job come to by themselves, and other jobs hardly ever."""
    if "MASTER_PORT" in environment:
        return _port(environment["MASTER_PORT"])
    name = " ".join(environment.get(variable, "") for variable in job)
    mixed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
    return 16_384 + mixed % 16_384  # below the ports that systems hand out by themselves


def _slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    nodes = environment["SLURM_STEP_NODELIST"]
    first = first_host(nodes)
    master = environment.get("MASTER_ADDR", "127.0.0.1" if first == nodes else first)
    return master, _agreed_port(environment, "SLURM_JOB_ID", "SLURM_STEP_ID")


def _mpi_meeting_point(environment: Mapping[str, str], size: int) -> tuple[str, int]:
    one_machine = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    master = environment.get("MASTER_ADDR", "127.0.0.1" if one_machine else None)
    if master is None:
        raise ValueError(
            f"mpirun started {size} processes on several machines and does not say where rank 0 is; "
            "add -x MASTER_ADDR=<the first host>"
        )
    return master, _agreed_port(environment, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def first_host(nodes: str) -> str:
    """The first of Slurm's host list: ``node[03-07,9],big1`` → ``node03``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodes)
    if first is None or nodes[first.end() :][:1] not in ("", ","):
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}; expected hosts such as node[03-07,9],big1")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


# ------------------------------------------------------------------------------------------------- on one machine

POLL_SECONDS = 0.05
LEAVE_SECONDS = 10.0
"""For the others to end by themselves once a rank has failed; their watch needs about half of it."""
KILL_SECONDS = 5.0
DRAIN_SECONDS = 5.0
# One ctrl-C may arrive twice: from the terminal, and passed on by a launcher that got it too.
ECHO_SECONDS = 1.0
SHOW_CURSOR = b"\x1b[?25h"
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def run_ranks(command: Sequence[str], count: int) -> int:
    """Runs ``command`` as ``count`` ranks on this machine; 0 if all of them end well, else the first failure's code.

    SIGTERM, SIGINT and SIGUSR1 are passed on to every rank, which saves if it can by then, and ends. That is no
    failure, and the code is the signal's. A second SIGINT ends all ranks at once. When a rank fails it is named, the
    others get `LEAVE_SECONDS`, and then are ended. However this process ends, its ranks end with it.

    Rank 0 prints where this process does. What other ranks print comes out on stderr, line by line, with their number.
    """
    if count < 1:
        raise ValueError(f"--nproc is {count}; expected at least 1 process")
    ranks: list[subprocess.Popen[bytes]] = []
    with _reserved_port() as port, _caught(tuple(STOPS)) as caught:
        try:
            for rank in range(count):
                ranks.append(_start(command, rank, count, port))
            relays = [_relay(rank, process.stdout) for rank, process in enumerate(ranks) if process.stdout]
            code = _supervise(ranks, caught)
        finally:
            for process in ranks:
                _send(process, signal.SIGKILL)
                process.wait()
            if ranks and os.isatty(2):
                _write(SHOW_CURSOR)  # a rank that was ended in the middle of its bar has left it hidden
    for relay in relays:
        relay.join(DRAIN_SECONDS)
    return code


def _start(command: Sequence[str], rank: int, count: int, port: int) -> subprocess.Popen[bytes]:
    environment = _defaults(count) | os.environ | {"LOCAL_WORLD_SIZE": str(count), "PYTHONUNBUFFERED": "1"}
    Placement(rank, count, rank, "127.0.0.1", port).export(environment)
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank else None,
        stderr=subprocess.STDOUT if rank else None,
        process_group=0,  # ctrl-C in a terminal comes to us alone, so that ranks get it once
        preexec_fn=_Tie(os.getpid()),
    )


def _defaults(count: int) -> dict[str, str]:
    """What the user may set otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a lost peer makes torch print C++ stacks; the watch says it in a sentence
    }


class _Tie:
    """Called in a new process: it shall be killed when its parent is gone, whatever ended it. On Linux only.

    And it shall ignore SIGINT until it can save, since Python's own answer is a page of traceback: see `_pass_on`.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def __call__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._prctl is not None:
            self._prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != self._parent:  # it was gone before we asked
            os._exit(1)


def _supervise(ranks: Sequence[subprocess.Popen[bytes]], caught: "deque[signal.Signals]") -> int:
    code = 0
    asked: signal.Signals | None = None
    interruptions = Interruptions()
    escalation: Iterator[None] = iter(())
    while None in [process.poll() for process in ranks]:
        while caught:
            number = caught.popleft()
            asked = asked or number
            again = number == signal.SIGINT and interruptions.again()
            _pass_on(signal.SIGKILL if again else number, ranks)
            if again:
                return Exit.INTERRUPTED
        if not code and (code := _first_failure(ranks, asked)):
            escalation = _escalation(ranks)
        next(escalation, None)
        time.sleep(POLL_SECONDS)
    return code or _first_failure(ranks, asked)


class Interruptions:
    """Counts ctrl-C."""

    def __init__(self) -> None:
        self._first: float | None = None

    def again(self) -> bool:
        """Told of a SIGINT; whether it is another one than the first, and not its echo."""
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        return now - self._first > ECHO_SECONDS


def _pass_on(number: signal.Signals, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM follows SIGINT: a rank that cannot save yet, and so ignores SIGINT, ends at once without a word. One that
    can has its reason to stop by then.
    """
    _send_all(ranks, number)
    if number == signal.SIGINT:
        _send_all(ranks, signal.SIGTERM)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], asked: signal.Signals | None) -> int:
    """The exit code to pass on, and on stderr who it is from; 0 if no rank has failed so far.

    Ranks that were asked to stop, and those that say themselves which of them stalled, are not blamed.
    """
    for rank, process in enumerate(ranks):
        code = process.returncode
        passed_on = code if code is None or code >= 0 else 128 - code
        if asked and passed_on in STOPS.values():
            return STOPS[asked]
        if code == Exit.STALLED or code in STOPS.values():
            return code
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            _write(f"cgf: rank {rank} (process {process.pid}) {how}; the other ranks are being ended\n".encode())
            return passed_on
    return 0


def _escalation(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Asked again and again after a failure: waits, terminates the others, waits, kills them."""
    for seconds, number in ((LEAVE_SECONDS, signal.SIGTERM), (KILL_SECONDS, signal.SIGKILL)):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield
        _send_all(ranks, number)


def _send_all(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To a rank and whatever it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextmanager
def _caught(numbers: Sequence[signal.Signals]) -> Iterator["deque[signal.Signals]"]:
    """Signals that arrive, instead of what they would do."""
    arrived: deque[signal.Signals] = deque()

    def take(number: int, _: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    former = {number: signal.signal(number, take) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _relay(rank: int, stream: IO[bytes]) -> threading.Thread:
    def pass_on() -> None:
        for line in stream:
            _write(b"[rank %d] %s\n" % (rank, line.rstrip(b"\r\n")))

    thread = threading.Thread(target=pass_on, name=f"output of rank {rank}", daemon=True)
    thread.start()
    return thread


_writing = threading.Lock()


def _write(line: bytes) -> None:
    """A whole line to stderr, in one piece."""
    with _writing, suppress(BrokenPipeError):
        while line:
            line = line[os.write(2, line) :]


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port of this machine that nobody else is given while we hold it, and that rank 0 can still listen on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _free_port() -> int:
    with _reserved_port() as port:
        return port


# ------------------------------------------------------------------------------------------------ on several machines


def run_hosts(hostfile: Path, arguments: Sequence[str]) -> int:
    """Runs ``cgf`` with ``arguments`` as ranks on the machines of ``hostfile``; the exit code of the launcher."""
    command = hosts_command(hostfile, arguments)
    if shutil.which("pdsh") is None:
        raise ValueError("--hostfile needs pdsh to reach other machines; install it, or start with torchrun or srun")
    return subprocess.run(command, check=False).returncode


def hosts_command(hostfile: Path, arguments: Sequence[str]) -> list[str]:
    """The command line of DeepSpeed's launcher that runs ``cgf`` with ``arguments`` on all hosts."""
    read_hostfile(hostfile)  # DeepSpeed runs on this machine alone, with a warning, when it finds no file
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile.absolute())),
        "--force_multi",  # or a single host in the file would mean this machine, whatever its name
        "--no_local_rank",
        *("--module", "compgen_fast"),
        *(_for_remote_shell(argument) for argument in arguments),
    ]


def read_hostfile(path: Path) -> dict[str, int]:
    """Processes by host, from lines ``host slots=N``; blank lines and # comments may stand between."""
    if not path.is_file():
        raise ValueError(f"--hostfile {path}: there is no such file; expected lines such as `node03 slots=8`")
    hosts: dict[str, int] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if found is None or int(found[2]) < 1:
            raise ValueError(f"{path}, line {number}: {text!r}; expected `host slots=N` with N of 1 or more")
        if found[1] in hosts:
            raise ValueError(f"{path}, line {number}: {found[1]} is there already; expected one line per host")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ValueError(f"{path}: no hosts; expected lines such as `node03 slots=8`")
    return hosts


def _for_remote_shell(argument: str) -> str:
    """Quoted for the shell that ssh starts. DeepSpeed itself puts double quotes around what has a space, no more."""
    if " " in argument:
        return re.sub(r"([\\$`])", r"\\\1", argument)
    return shlex.quote(argument)
