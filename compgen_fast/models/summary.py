"""What a model is made of and what it costs: parameters by part, FLOPs per image, and the shape of each stage.

FLOPs are those of matrix products, convolutions and attention, a multiplication and an addition being two; pointwise
work does not count, as everywhere in torch's FLOP counter. The training step is really taken, forward, penalty and
backward, but on tensors without memory, so the reference sizes need a second. Time is not counted here: see `bench/`.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from compgen_fast.draws import Draws
from compgen_fast.generate.generator import Generator
from compgen_fast.models.build import build
from compgen_fast.models.config import ModelConfig
from compgen_fast.tables import Sheet
from compgen_fast.worlds.source import Factor

Result = TypeVar("Result")
Shape = Sequence[int]

WARMED_UP = 2**40  # a step after any warm-up
DRAWN = 16  # images whose tokens a generator hides at random; what it costs is their mean


@dataclass(frozen=True)
class Part:
    """One part of the model: how many parameters it has, and how many of them are trained."""

    name: str
    parameters: int
    trainable: int


@dataclass(frozen=True)
class Stage:
    """What a module returned, in the order in which modules finished."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """FLOPs are per image; None where the model has no such part."""

    parts: tuple[Part, ...]
    stages: tuple[Stage, ...]
    encoder_flops: int | None
    decoder_flops: int | None
    step_flops: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def trainable(self) -> int:
        return sum(part.trainable for part in self.parts)


def summarise(model: nn.Module, image_size: int, batch: int = 1) -> Summary:
    """The summary of a model of square images, in batches, or of a generator.

    What is computed once for a batch (the decoder's first queries) is shared out among its images.
    """
    if isinstance(model, Generator):
        return _on_ghost(model, _summarise_generator)
    return _on_ghost(model, lambda ghost: _summarise(ghost, image_size, batch))


def of_config(config: ModelConfig, factors: Sequence[Factor] = ()) -> Summary:
    """The summary of the model of these settings; a supervised one and a generator need their data set's factors."""
    return summarise(build(config, factors), config.image_size)


def training_flops(model: nn.Module, image_size: int, batch: int = 1) -> int:
    """FLOPs per image of one training step."""
    return _on_ghost(model, lambda ghost: _count_step(ghost, image_size, batch))


def _on_ghost(model: nn.Module, look: Callable[[Any], Result]) -> Result:
    """``look`` at a copy whose tensors have shapes and no memory."""
    try:
        with warnings.catch_warnings(), FakeTensorMode() as mode:
            # Jets ask whether two sides lie at one address. Here all do, and all are views of one side.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return look(_ghost(model, mode))
    except (DataDependentOutputException, DynamicOutputShapeException):
        # The size of something depends on a value, which a tensor without memory has not: take the step for real.
        return look(model)


def _ghost(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model whose parameters and buffers are fake, and on the CPU: there every kernel has a formula."""
    tensors = [*model.parameters(), *model.buffers()]
    with mode:
        fakes = [torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad) for t in tensors]
    ghost = copy.deepcopy(model, {id(tensor): fake for tensor, fake in zip(tensors, fakes, strict=True)})
    vars(ghost).pop("forward", None)  # what was put around it, autocast say, would call the model's and not the ghost's
    return ghost


def _inputs(model: nn.Module, image_size: int, batch: int) -> tuple[Tensor, Draws]:
    device = next(model.parameters()).device
    if isinstance(model, Generator):
        return model.blank(batch), Draws.at(0, 0, device=device)
    images = torch.zeros(batch, image_size, image_size, 3, dtype=torch.uint8, device=device)
    return images, Draws.at(0, 0, device=device)


def _summarise_generator(model: Generator) -> Summary:
    tokens, draws = _inputs(model, 0, 1)
    with _recorded(model) as stages, torch.no_grad():
        model(tokens, _factors(model, tokens), step=WARMED_UP, draws=draws)
    return Summary(
        parts=tuple(_part(name, child) for name, child in model.named_children()),
        stages=(Stage("tokens", tuple(tokens.shape)), *stages),
        encoder_flops=None,
        decoder_flops=None,
        step_flops=_count_step(model, 0, 1),
    )


def _summarise(model: Any, image_size: int, batch: int) -> Summary:
    images, draws = _inputs(model, image_size, batch)
    with _recorded(model) as stages, torch.no_grad():
        encoded, encoder = _counted(lambda: model.encode(images, draws))
        decoder = None
        if hasattr(model, "decode"):
            latents = encoded[0] if isinstance(encoded, tuple) else encoded
            _, decoder = _counted(lambda: model.decode(latents))
    return Summary(
        parts=tuple(_part(name, child) for name, child in model.named_children()),
        stages=(Stage("images", tuple(images.shape)), *stages),
        encoder_flops=encoder // batch,
        decoder_flops=None if decoder is None else decoder // batch,
        step_flops=_count_step(model, image_size, batch),
    )


def _count_step(model: nn.Module, image_size: int, batch: int) -> int:
    batch = max(batch, DRAWN) if isinstance(model, Generator) else batch
    _, flops = _counted(lambda: _train(model, *_inputs(model, image_size, batch)))
    return flops // batch


def _train(model: nn.Module, images: Tensor, draws: Draws) -> None:
    """One step's forward and backward; no gradient is left behind."""
    loss = model(images, _factors(model, images), step=WARMED_UP, draws=draws)["loss"]
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _factors(model: Any, images: Tensor) -> dict[str, Tensor]:
    """Those that a model predicts or is told, [B] zeros each."""
    return {
        factor.name: images.new_zeros(len(images), dtype=torch.int64 if factor.categorical else torch.float32)
        for factor in getattr(model, "factors", ())
    }


def _part(name: str, module: nn.Module) -> Part:
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return Part(name, sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[Stage]]:
    """Collects the outputs of the model's parts and of their parts."""
    stages: list[Stage] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                stages.append(Stage(name, tuple(first.shape)))

        return hook

    shown = [(name, module) for name, module in model.named_modules() if name and name.count(".") < 2]
    handles = [module.register_forward_hook(record(name)) for name, module in shown]
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


class _NoModules:
    """In place of the counter's record of which module is running, which hangs hooks on tensors, and jets take none."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _counted(run: Callable[[], Any]) -> tuple[Any, int]:
    counter = FlopCounterMode(display=False, custom_mapping=formulas())
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        result = run()
    return result, counter.get_total_flops()


def formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs from the shapes of arguments, of our ops and of torch's that its own counter leaves out.

    They are what an op has to compute, whatever its backend does.
    """
    ops = torch.ops.compgen
    return {
        ops.slot_cross_attention: _slot_cross_attention,
        ops.slot_cross_attention_backward: _slot_cross_attention_backward,
        ops.slot_competition: _slot_competition,
        ops.slot_competition_backward: _slot_competition_backward,
        ops.jet_linear: _jet_linear,
        ops.jet_cross_attention: _jet_cross_attention,
        ops.jet_cross_attention_backward: _jet_cross_attention_backward,
        ops.jet_slot_products: _jet_slot_products,
        ops.jet_slot_mix: _jet_slot_mix_or_sums,
        ops.jet_slot_sums: _jet_slot_mix_or_sums,
        ops.trunk_block: _trunk_block,
        ops.trunk_block_backward: _trunk_block_backward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_on_cpu_backward,
    }


def _product(pixels: Shape, slots: Shape) -> int:
    """One product of pixels [B, N, H, D] and slots [B, S, H, D], in either direction: q·k, or Σ_s p v, or Σ_n p g."""
    return 2 * math.prod(pixels) * slots[1]


def _slot_cross_attention(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    """q·k and p v."""
    return 2 * _product(q, k)


def _slot_cross_attention_backward(grad: Shape, grad_weights: Any, q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    """q·k again, dp, dq, dk and dv."""
    return 5 * _product(q, k)


def _slot_competition(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    """q·k and a v."""
    return 2 * _product(k, q)


def _slot_competition_backward(
    grad: Shape, grad_weights: Any, q: Shape, k: Shape, v: Shape, slot_mask: Any, weights: Any, *_: Any, **__: Any
) -> int:
    """da, dq, dk and dv, and q·k again unless the forward's weights were kept."""
    return (5 if weights is None else 4) * _product(k, q)


def _jet_linear(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Each channel times the weight; its backward is made of itself and of ordinary products."""
    return 2 * math.prod(x) * weight[0]


def _jet_product(channels: int) -> int:
    """How many products make the product of pixels with 1 or 4 channels and slots (value, tangent along u or v).

    With 4: each channel with the value, and x and one of x_u and x_v with the tangent (the other has no mixed term).
    """
    return {1: 2, 4: 6}[channels]


def _jet_cross_attention(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    """q·k and p v, where p has 4 channels."""
    return (_jet_product(q[0]) + _jet_product(4)) * _product(q[1:], k[1:])


def _jet_cross_attention_backward(grad: Shape, q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    """q·k again, dq and dk by the channels of q; dp and dv by the 4 of p and of the gradient."""
    return (3 * _jet_product(q[0]) + 2 * _jet_product(4)) * _product(q[1:], k[1:])


def _jet_slot_products(pixels: Shape, slots: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """Each of the weights [W, B, M, N] is a product along Q."""
    return 2 * math.prod(out_shape) * slots[-1]


def _jet_slot_mix_or_sums(weights: Shape, other: Shape, *_: Any, **__: Any) -> int:
    """Each of the weights [W, B, M, N] meets Q numbers, of a slot or of a pixel."""
    return 2 * math.prod(weights) * other[-1]


def _trunk_block(x: Shape, *_: Any, **__: Any) -> int:
    """Twelve products of tokens [B, T, W] by W × W weights, q·k and p v."""
    return 2 * math.prod(x) * (12 * x[2] + 2 * x[1])


def _trunk_block_backward(grad: Shape, *_: Any, **__: Any) -> int:
    """Both gradients of each product, and of attention q·k again, dp, dq, dk and dv."""
    return 2 * math.prod(grad) * (24 * grad[2] + 5 * grad[1])


def _attention_on_cpu(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)  # type: ignore[no-any-return]


def _attention_on_cpu_backward(grad: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)  # type: ignore[no-any-return]


def show(summary: Summary, console: Console) -> None:
    console.print(parameters_table(summary))
    console.print(flops_table(summary))
    console.print(stages_table(summary))


def parameters_table(summary: Summary) -> Sheet:
    table = Sheet("part", "parameters", "trained", "frozen")
    whole = Part("all", summary.parameters, summary.trainable)
    for part in (*summary.parts, whole):
        counts = (part.parameters, part.trainable, part.parameters - part.trainable)
        table.add_row(part.name, *(f"{count:,}" for count in counts), style="bold" if part is whole else "")
    return table


def flops_table(summary: Summary) -> Sheet:
    table = Sheet("per image", "GFLOP")
    rows = {
        "encoder forward": summary.encoder_flops,
        "decoder forward": summary.decoder_flops,
        "training step": summary.step_flops,
    }
    for name, flops in rows.items():
        if flops is not None:
            table.add_row(name, f"{flops / 1e9:,.3f}")
    return table


def stages_table(summary: Summary) -> Sheet:
    table = Sheet("stage", "shape")
    for stage in summary.stages:
        table.add_row(stage.name, " × ".join(map(str, stage.shape)))
    return table
