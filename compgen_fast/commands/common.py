"""What all commands share: how a request is refused, and how the code that serves it is found when it is asked for."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from compgen_fast.exits import ended_by_ctrl_c
from compgen_fast.nearest import instead_of


class UsageError(Exception):
    """The request cannot be met, and its message tells the user what to change."""


@contextmanager
def refusals() -> Iterator[None]:
    """What the library refuses with a sentence is the user's to change."""
    errors = load("compgen_fast.stream.faults")
    try:
        yield
    except BrokenPipeError:
        raise  # an OSError that refuses nothing
    except (errors.StreamError, ValueError, ImportError, OSError) as refusal:
        raise UsageError(str(refusal)) from None


def load(module: str) -> ModuleType:
    """Import what a command needs. The ops refuse a wrong COMPGEN_BACKEND while they are imported."""
    try:
        with ended_by_ctrl_c():
            return import_module(module)
    except ValueError as refusal:
        raise UsageError(str(refusal)) from None


def check_cuda(asked: str = "--device cuda") -> None:
    """Refuses what was ``asked`` for where it needs a GPU and there is none."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"{asked}: torch sees no CUDA or ROCm device here; `cgf env` says what it sees")


def refuse_unknown(given: Sequence[str], what: str, known: Iterable[str]) -> None:
    """Refuses a first word that is none of the ``known``, with those that it may have been meant for."""
    names = list(known)
    if not given or given[0].startswith("-") or given[0] in names:
        return
    raise UsageError(f"there is no {what} {given[0]!r}; {instead_of(given[0], names)}")
