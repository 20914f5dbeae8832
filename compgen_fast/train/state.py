"""What a run consists of at one moment, apart from any disk: the engine's state, and that of the random generators.

`collect` gives the engine's state as named tensors on rank 0, each parameter whole: it does not show how many ranks
there were or what ZeRO had spread over them. `restore` puts it into an engine of any number of ranks and any of the
stages 0, 1, 2, bit for bit. DeepSpeed's own helpers are not used: they add up zeros from all ranks, one message per
parameter, which is slow and turns −0 into 0.

    module.<name>       parameters (the optimiser's fp32 ones), frozen parameters and buffers
    exp_avg.<name>, exp_avg_sq.<name>, step.<name>      AdamW's state of a trained parameter
    engine.<counter>    the engine's counters

Under ZeRO, AdamW steps one long tensor per parameter group: this rank's share of all parameters laid end to end.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compgen_fast.models.io import copied

MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Engine(Protocol):
    """What is used of DeepSpeed's engine."""

    module: nn.Module
    optimizer: Any
    micro_steps: int

    def zero_optimization_stage(self) -> int: ...

    def gradient_accumulation_steps(self) -> int: ...


@dataclass(frozen=True)
class _Laid:
    """A parameter within what AdamW steps: ``offset`` numbers from the start of the whole."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel()


@dataclass(frozen=True)
class _Stepped:
    """A tensor that AdamW steps: this rank's numbers [begin, begin + numel) of a whole of ``length``."""

    tensor: Tensor
    settings: Mapping[str, Any]
    length: int
    begin: int
    parameters: tuple[_Laid, ...]


def collect(engine: Engine) -> dict[str, Tensor]:
    """The engine's state, copied to the CPU of rank 0; the other ranks help and get nothing. All ranks call it."""
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise ValueError(
            f"collect: {engine.micro_steps} micro-batches are done, and a step takes "
            f"{engine.gradient_accumulation_steps()}; expected to be called between steps, since gradients are not kept"
        )
    state: dict[str, Tensor] = {}
    if _rank() == 0:
        state |= {f"module.{name}": copied(tensor) for name, tensor in engine.module.state_dict().items()}
        state |= {f"engine.{name}": torch.tensor(int(getattr(engine, name))) for name in COUNTERS}
    for stepped in _stepped(engine):
        adam = engine.optimizer.state.get(stepped.tensor, {})
        if unknown := adam.keys() - {*MOMENTS, "step"}:
            raise ValueError(
                f"collect: the optimiser keeps {', '.join(sorted(unknown))}; expected AdamW without amsgrad"
            )
        for kind, mine in [("module", stepped.tensor), *((moment, adam.get(moment)) for moment in MOMENTS)]:
            # Before its first step AdamW has no state, which is the same as zeros.
            whole = _gathered(torch.zeros_like(stepped.tensor) if mine is None else mine.detach(), stepped.length)
            if whole is not None:
                state |= {f"{kind}.{p.name}": copied(whole[p.offset : p.end].view(p.shape)) for p in stepped.parameters}
        if _rank() == 0:
            state |= {f"step.{p.name}": torch.tensor(int(adam.get("step", 0))) for p in stepped.parameters}
    return state


@torch.no_grad()
def restore(engine: Engine, state: Mapping[str, Tensor]) -> None:
    """Puts what `collect` gave on rank 0 into this engine, or raises before anything is changed. All ranks call it;
    only rank 0's ``state`` counts.
    """
    found = _from_first({name: _described(name, tensor) for name, tensor in state.items()})
    steppeds = _stepped(engine)
    _check_fit(found, _expected(engine, steppeds))
    steps = [_common_step(stepped, found) for stepped in steppeds]

    for name, tensor in engine.module.state_dict().items():
        tensor.copy_(_sent(state.get(f"module.{name}"), tensor.shape, tensor.dtype, tensor.device))
    if engine.zero_optimization_stage() > 0:
        engine.optimizer.refresh_fp32_params()  # this rank's share of the weights, from the weights
    for stepped, step in zip(steppeds, steps, strict=True):
        adam = engine.optimizer.state[stepped.tensor]
        for moment in MOMENTS:
            mine = _share(stepped, {p.name: state.get(f"{moment}.{p.name}") for p in stepped.parameters})
            # Written in place where there is something: DeepSpeed holds views of it.
            adam.setdefault(moment, torch.zeros_like(stepped.tensor)).copy_(mine.view(stepped.tensor.shape))
        adam.setdefault("step", _zero_steps(stepped)).fill_(step)
    for name in COUNTERS:
        setattr(engine, name, found[f"engine.{name}"])
    engine.micro_steps = found["engine.global_steps"] * engine.gradient_accumulation_steps()


def _stepped(engine: Engine) -> list[_Stepped]:
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return [
            _Stepped(parameter, group, parameter.numel(), 0, (_Laid(names[parameter], parameter.shape, 0),))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel() > 0
        ]
    groups = zip(
        optimizer.single_partition_of_fp32_groups,
        optimizer.param_groups,
        optimizer.bit16_groups_flat,
        optimizer.bit16_groups,
        strict=True,
    )
    return [
        _Stepped(
            mine,
            group,
            whole.numel(),
            _rank() * mine.numel(),
            tuple(_Laid(names[p], p.shape, p.storage_offset() - whole.storage_offset()) for p in parameters),
        )
        for mine, group, whole, parameters in groups
    ]


def _gathered(mine: Tensor, length: int) -> Tensor | None:
    """All ranks' shares end to end [length], on rank 0; None on the others."""
    if mine.numel() == length:  # nothing is spread: every rank has it all
        return mine.reshape(-1) if _rank() == 0 else None
    whole = mine.new_empty(length) if _rank() == 0 else None
    dist.gather(mine.contiguous(), None if whole is None else [*whole.split(mine.numel())])
    return whole


def _share(stepped: _Stepped, values: Mapping[str, Tensor | None]) -> Tensor:
    """This rank's numbers [numel] of parameters that rank 0 holds whole; zero where there is only padding."""
    mine = torch.zeros(stepped.tensor.numel(), dtype=stepped.tensor.dtype, device=stepped.tensor.device)
    for p in stepped.parameters:
        value = _sent(values[p.name], p.shape, mine.dtype, mine.device).reshape(-1)
        first, last = max(p.offset, stepped.begin), min(p.end, stepped.begin + mine.numel())
        if first < last:
            mine[first - stepped.begin : last - stepped.begin] = value[first - p.offset : last - p.offset]
    return mine


def _zero_steps(stepped: _Stepped) -> Tensor:
    """AdamW's own form of a step count: on the device where its kernel counts by itself."""
    counts = stepped.settings.get("fused") or stepped.settings.get("capturable")
    return torch.zeros((), dtype=torch.float32, device=stepped.tensor.device if counts else "cpu")


def _described(name: str, tensor: Tensor) -> Any:
    """What all ranks are told in advance: a count itself, and the kind of anything else."""
    return int(tensor) if name.startswith(("step.", "engine.")) else (tensor.shape, tensor.dtype)


def _expected(engine: Engine, steppeds: Sequence[_Stepped]) -> dict[str, Any]:
    """What `_described` says of a state that fits; None for a count, which may be any."""
    expected: dict[str, Any] = {f"engine.{name}": None for name in COUNTERS}
    for name, tensor in engine.module.state_dict().items():
        expected[f"module.{name}"] = (tensor.shape, tensor.dtype)
    for stepped in steppeds:
        for p in stepped.parameters:
            expected |= {f"{moment}.{p.name}": (p.shape, stepped.tensor.dtype) for moment in MOMENTS}
            expected[f"step.{p.name}"] = None
    return expected


def _check_fit(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for entry in [*expected, *(entry for entry in found if entry not in expected)]:
        kind, name = entry.split(".", 1)
        if entry not in found or entry not in expected:
            has, lacks = ("model", "state") if entry in expected else ("state", "model")
            what = {"module": f"{name}", "engine": f"the counter {name}"}.get(kind, f"AdamW's {kind} of {name}")
            raise ValueError(
                f"restore: the {has} has {what} and the {lacks} has not; expected a model with the same parameters, "
                "of which the same are trained, as when the state was saved"
            )
        if expected[entry] is not None and found[entry] != expected[entry]:
            (there, stored), (here, dtype) = found[entry], expected[entry]
            raise ValueError(
                f"restore: {name} is {list(there)} {stored} in the state and {list(here)} {dtype} in the model; "
                "build the model with the settings that it was saved with"
            )


def _common_step(stepped: _Stepped, found: Mapping[str, Any]) -> int:
    """AdamW counts the steps of each tensor it steps, and under ZeRO that is a whole parameter group."""
    counts = {p.name: found[f"step.{p.name}"] for p in stepped.parameters}
    low, high = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[low] != counts[high]:
        raise ValueError(
            f"restore: AdamW stepped {low} {counts[low]} times and {high} {counts[high]} times, and ZeRO keeps one "
            "count for both; expected equal counts: go on with zero_stage 0, as it was saved, or freeze what is unused"
        )
    return int(counts[low])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _from_first(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    if _several():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _sent(tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rank 0's tensor, on every rank's device; the others give None or anything."""
    if _rank() == 0:
        assert tensor is not None
        sent = tensor.to(device).contiguous()
    else:
        sent = torch.empty(shape, dtype=dtype, device=device)
    if _several():
        dist.broadcast(sent, src=0)
    return sent


def shared(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Rank 0's named tensors, on every rank's device. All ranks call it."""
    kinds = _from_first({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    return {name: _sent(tensors.get(name), shape, dtype, device) for name, (shape, dtype) in kinds.items()}


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators that code may use without asking, of Python, NumPy and torch, as JSON knows it."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    state = {"python": [version, list(numbers), gauss], "numpy": legacy, "cpu": _hex(torch.get_rng_state())}
    return state if device.type != "cuda" else {**state, "cuda": _hex(torch.cuda.get_rng_state(device))}


def restore_random(states: Sequence[Mapping[str, Any]], rank: int, device: torch.device) -> None:
    """Sets this rank's generators to how it left them. A rank or a device that was not there gets its own seed."""
    told = json.dumps([states[0], rank], sort_keys=True).encode()
    seed = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1
    mine = states[rank] if rank < len(states) else {}
    if not mine:
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)
        return
    version, numbers, gauss = mine["python"]
    random.setstate((version, tuple(numbers), gauss))
    legacy = {**mine["numpy"], "state": {**mine["numpy"]["state"]}}
    legacy["state"]["key"] = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state(legacy)
    torch.set_rng_state(_unhex(mine["cpu"]))
    if device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(_unhex(mine["cuda"]), device)
    elif device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
