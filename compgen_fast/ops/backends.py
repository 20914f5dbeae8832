"""Which backend serves which op on which device, decided once at import and left to torch's dispatcher after that.

Every op is registered in the dispatcher namespace ``compgen``: the plain-torch reference for every device
(``CompositeExplicitAutograd``), over it the C++ kernels of ``csrc/`` for CPU tensors and the Triton kernels of
``kernels/`` for CUDA and ROCm tensors. ``COMPGEN_BACKEND=triton|cpp|torch`` names one backend for all devices; where it
cannot serve a call, the call is refused rather than handed to another backend behind the user's back.

What it is not: a per-call switch. Nothing here runs when an op is called.
"""

import functools
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Backend = Literal["triton", "cpp", "torch"]
Device = Literal["cpu", "cuda"]

BUILD_INFO = Path(__file__).parent.parent / "_build_info.json"
_library = torch.library.Library("compgen", "FRAGMENT")
_ops: list[str] = []


@dataclass(frozen=True)
class Status:
    """Whether a backend serves an op on a device, and why or why not."""

    backend: Backend
    live: bool
    reason: str


def requested() -> Backend | None:
    """The backend named by ``COMPGEN_BACKEND``, if any."""
    value = os.environ.get("COMPGEN_BACKEND", "")
    if value and value not in get_args(Backend):
        choices = ", ".join(get_args(Backend))
        raise ValueError(f"COMPGEN_BACKEND={value!r}: expected one of {choices}, or unset to choose by device")
    return value or None  # type: ignore[return-value]


def interpreting() -> bool:
    """Whether Triton runs its kernels on CPU tensors, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _cpp_missing() -> str:
    """Loads the C++ kernels; returns why they are not there, or an empty string."""
    try:
        importlib.import_module("compgen_fast._C")
    except ImportError as error:
        if BUILD_INFO.exists() and (built := json.loads(BUILD_INFO.read_text())).get("error"):
            return f"not built: {built['error']}"
        return f"not built: {error}"
    return ""


def _cannot_serve(backend: Backend, device: Device) -> str:
    """Why ``backend`` cannot serve ``device`` on this machine, or an empty string."""
    if backend == "torch":
        return ""
    if backend == "cpp":
        return "C++ kernels are for CPU tensors" if device == "cuda" else _cpp_missing()
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'compgen-fast[gpu]')"
    if device == "cpu":
        return "" if interpreting() else "CPU tensors need TRITON_INTERPRET=1 (a slow interpreter, for tests)"
    return "" if torch.cuda.is_available() else "no CUDA or ROCm device"


def _natural(device: Device) -> Backend:
    """The fastest backend that can serve ``device`` when nobody asked for one."""
    preferred: Backend = "cpp" if device == "cpu" else "triton"
    return "torch" if _cannot_serve(preferred, device) else preferred


def serving(device: Device) -> Backend | None:
    """The backend that serves ``device``; None when the one asked for cannot."""
    wanted = requested()
    if wanted is None:
        return _natural(device)
    return None if _cannot_serve(wanted, device) else wanted


def statuses(op: str, device: Device) -> tuple[Status, ...]:
    """For each backend whether it serves ``op`` on ``device`` and why; at most one is live."""
    if op not in _ops:
        raise KeyError(f"no op named {op!r}; there are {', '.join(_ops)}")
    return tuple(_status(backend, device) for backend in get_args(Backend))


def _status(backend: Backend, device: Device) -> Status:
    live = serving(device)
    if backend == live:
        why = "asked for by COMPGEN_BACKEND" if requested() else "fastest for this device"
        return Status(backend, True, "no faster backend here" if backend == "torch" and not requested() else why)
    if reason := _cannot_serve(backend, device):
        return Status(backend, False, reason)
    return Status(backend, False, f"disabled by COMPGEN_BACKEND={requested()}" if requested() else f"{live} is faster")


def ops() -> tuple[str, ...]:
    """The names of all ops, in the order in which they were defined."""
    return tuple(_ops)


def define_op(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any] | None,
    triton: str | None,
    fake: Callable[..., Any],
    public: bool,
) -> None:
    """Registers op ``compgen::name``: its schema, shapes (``fake``), plain-torch ``reference`` and Triton launcher.

    ``triton`` names the launcher as ``module:function`` below ``compgen_fast.kernels``; it is imported at the first
    call, so CPU users never need Triton. None is for an op whose reference is the best there is on a GPU.
    ``reference`` is None for an op that only C++ has: its caller takes plain torch where C++ does not serve.
    The C++ kernel registers itself when ``compgen_fast._C`` is loaded.
    ``public`` lists the op in :func:`ops`; backward passes are not listed.
    """
    if public:
        _ops.append(name)
    _library.define(name + schema)
    if reference is not None:
        _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compgen::{name}", fake, lib=_library)
    for device in get_args(Device):
        if (kernel := _python_kernel(name, triton, device)) is not None:
            _library.impl(name, kernel, device.upper())


def _python_kernel(name: str, triton: str | None, device: Device) -> Callable[..., Any] | None:
    """What Python registers for ``device`` beside the reference: the Triton launcher, a refusal, or nothing."""
    backend = serving(device) if device == "cpu" or requested() else "triton"
    if backend == "triton":
        return None if triton is None else _lazy_launcher(triton)
    if backend is None:
        return _refusal(name, device)
    return None


def _lazy_launcher(path: str) -> Callable[..., Any]:
    module, function = path.split(":")

    @functools.cache
    def load() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"compgen_fast.kernels.{module}"), function)  # type: ignore[no-any-return]

    return lambda *args: load()(*args)


def _refusal(name: str, device: Device) -> Callable[..., Any]:
    wanted = requested()
    assert wanted is not None
    sentence = f"{name}: COMPGEN_BACKEND={wanted} cannot serve {device} tensors: {_cannot_serve(wanted, device)}. "

    def refuse(*args: Any) -> Any:
        raise RuntimeError(sentence + "Unset COMPGEN_BACKEND to let the device choose.")

    return refuse


def _load_cpp() -> None:
    """Loads the C++ kernels unless another backend was asked for; says once when they are missing."""
    if requested() not in (None, "cpp"):
        return
    if missing := _cpp_missing():
        warnings.warn(
            f"compgen_fast: C++ kernels {missing}; CPU tensors are served by plain torch, which is slower. "
            "`cgf env` shows details.",
            RuntimeWarning,
            stacklevel=2,
        )


_load_cpp()
