"""The summary of a model: FLOPs against counts made by hand, and what the tables say."""

import io
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from compgen_fast.draws import Draws
from compgen_fast.generate.config import DiTConfig, GIVTConfig, JepaConfig, MARConfig, MaskGITConfig, TrunkConfig
from compgen_fast.models import PatchDecoder, SlotVAE, SpatialBroadcastDecoder, SupervisedEncoder
from compgen_fast.models.build import build
from compgen_fast.models.config import (
    DecoderConfig,
    EncoderConfig,
    LossConfig,
    ReplayConfig,
    SlotVAEConfig,
    SupervisedConfig,
)
from compgen_fast.models.frame_decoder import FrameDecoder
from compgen_fast.models.summary import Stage, _counted, formulas, of_config, show, summarise, training_flops
from compgen_fast.ops import jet_cross_attention, slot_competition, slot_cross_attention, trunk_block
from compgen_fast.ops.jet_linear import jet_linear
from compgen_fast.worlds.source import Factor
from tests.models.test_slot_vae import ATTENTION, TinyEncoder

B, N, S, H, D = 2, 9, 3, 4, 5
PRODUCT = 2 * B * N * S * H * D


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def forward_and_backward(run: Any) -> tuple[int, int]:
    outputs, forward = _counted(run)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    _, backward = _counted(lambda: sum(output.sum() for output in outputs).backward())
    return forward, backward


@pytest.mark.parametrize("with_weights", [False, True])
def test_slot_cross_attention_is_two_products_and_five_backward(with_weights: bool) -> None:
    q, k, v = leaf(B, N, H, D), leaf(B, S, H, D), leaf(B, S, H, D)
    found = forward_and_backward(lambda: slot_cross_attention(q, k, v, return_weights=with_weights))
    assert found == (2 * PRODUCT, 5 * PRODUCT)


@pytest.mark.parametrize(("heads", "backward"), [(1, 4), (H, 5)])
def test_slot_competition_keeps_its_weights_where_it_can(heads: int, backward: int) -> None:
    q, k, v = leaf(B, S, heads, D), leaf(B, N, heads, D), leaf(B, N, heads, D)
    product = 2 * B * N * S * heads * D
    assert forward_and_backward(lambda: slot_competition(q, k, v)) == (2 * product, backward * product)


@pytest.mark.parametrize(("channels", "forward", "backward"), [(1, 8, 18), (4, 12, 30)])
def test_attention_of_jets_counts_the_channels_there_are(channels: int, forward: int, backward: int) -> None:
    """q with 1 channel: q·k and q·k_t, then p has 4: each with v, p and one of p_u, p_v with v_t. With 4: 6 and 6."""
    q, k, v = leaf(channels, B, N, H, D), leaf(2, B, S, H, D), leaf(2, B, S, H, D)
    side = torch.rand(B, S) < 0.5
    found = forward_and_backward(lambda: jet_cross_attention(q, k, v, side))
    assert found == (forward * PRODUCT, backward * PRODUCT)


def test_a_linear_map_of_jets_is_one_product_per_channel() -> None:
    x, weight, bias = leaf(4, B, N, 6), leaf(7, 6), leaf(7)
    product = 2 * 4 * B * N * 6 * 7
    assert forward_and_backward(lambda: jet_linear(x, weight, bias)) == (product, 2 * product)


def test_the_products_of_folded_attention_are_those_of_its_matrix_products() -> None:
    """Counted as ops, and as the matrix products that their formulas consist of."""
    from compgen_fast.ops import jet_slot_products as ops

    pixels, slots, weights = torch.randn(4, B, N, 6), torch.randn(2, B, S, 6), torch.randn(7, B, S, N)
    for op, formula, arguments in (
        (torch.ops.compgen.jet_slot_products, ops.products_reference, (pixels, slots, 0)),
        (torch.ops.compgen.jet_slot_products, ops.products_reference, (pixels[:1, :1], slots, 0)),
        (torch.ops.compgen.jet_slot_mix, ops.mix_reference, (weights, slots, 1, B)),
        (torch.ops.compgen.jet_slot_mix, ops.mix_reference, (weights[:2], slots, 0, 1)),
        (torch.ops.compgen.jet_slot_sums, ops.sums_reference, (weights, pixels, 0)),
        (torch.ops.compgen.jet_slot_sums, ops.sums_reference, (weights[:2], pixels[:1, :1], 0)),
    ):
        (_, found), (_, expected) = (_counted(lambda run=run, given=arguments: run(*given)) for run in (op, formula))
        assert found == expected > 0


def test_torchs_attention_on_the_cpu_counts() -> None:
    q, k, v = leaf(B, H, N, 8), leaf(B, H, S, 8), leaf(B, H, S, 8)
    product = 2 * B * H * N * S * 8
    found = forward_and_backward(lambda: nn.functional.scaled_dot_product_attention(q, k, v))
    assert found == (2 * product, 5 * product)


def test_a_layer_of_a_trunk_counts_as_its_plain_products_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, modulation, W = leaf(B, N, 8), leaf(B, 6, 8), 8
    shapes = ((3 * W, W), (3 * W,), (W, W), (W,), (4 * W, W), (4 * W,), (W, 4 * W), (W,))
    weights = trunk_block.BlockWeights(*(leaf(*shape) for shape in shapes))
    run = lambda: trunk_block.trunk_block(x, modulation, weights, 2)  # noqa: E731
    found = forward_and_backward(run)
    monkeypatch.setattr(trunk_block, "FUSED", False)
    assert found == forward_and_backward(run)


def test_every_op_of_ours_is_counted_or_pointwise() -> None:
    ours = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("compgen::")}
    counted = {str(op).removeprefix("compgen.") for op in formulas()}
    pointwise = ("norm", "gelu", "silu", "softmax", "recon_error", "latent_adam")
    assert {name for name in ours - counted if not any(kind in name for kind in pointwise)} == set()


SIZE, SLOTS, DIM, WIDTH, OCTAVES = 4, 3, 2, 6, 2
PIXELS = SIZE**2
CONFIG = SlotVAEConfig(SIZE, SLOTS, DIM, loss=LossConfig(penalty="none"))
ENCODER = 2 * (3 * PIXELS) * (SLOTS * 2 * DIM)
FROM_SLOT, FROM_POSITION = 2 * SLOTS * DIM * WIDTH, 2 * PIXELS * 4 * OCTAVES * WIDTH
HIDDEN, OUT = 2 * SLOTS * PIXELS * WIDTH * WIDTH, 2 * SLOTS * PIXELS * WIDTH * 4


def painted_vae(penalty: Any = "none") -> SlotVAE:
    decoder = SpatialBroadcastDecoder(DIM, SIZE, kind="mlp", layers=2, width=WIDTH, octaves=OCTAVES)
    config = replace(CONFIG, loss=LossConfig(penalty=penalty))
    return SlotVAE(config, TinyEncoder(SIZE, SLOTS, 2 * DIM), decoder)


def test_the_parts_of_a_model_cost_what_a_count_by_hand_says() -> None:
    summary = summarise(painted_vae(), SIZE)
    assert summary.encoder_flops == ENCODER
    assert summary.decoder_flops == FROM_SLOT + FROM_POSITION + HIDDEN + OUT
    # Backward there are two products for each: one for the input, one for the weight. Images and positions are given.
    assert summary.step_flops == 2 * (ENCODER + FROM_POSITION) + 3 * (FROM_SLOT + HIDDEN + OUT)


def test_a_painters_derivatives_cost_two_channels() -> None:
    step = training_flops(painted_vae("hessian"), SIZE)
    assert step == 2 * (ENCODER + FROM_POSITION) + 2 * 3 * (FROM_SLOT + HIDDEN + OUT)


def test_what_a_batch_shares_is_shared_out() -> None:
    summary = summarise(painted_vae(), SIZE, batch=4)
    assert summary.encoder_flops == ENCODER
    assert summary.decoder_flops == FROM_SLOT + FROM_POSITION // 4 + HIDDEN + OUT
    assert summary.step_flops == 2 * (ENCODER + FROM_POSITION // 4) + 3 * (FROM_SLOT + HIDDEN + OUT)


def test_counting_leaves_no_trace() -> None:
    model = painted_vae("hessian")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summarise(model, SIZE)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_frozen_parameters_are_told_apart_and_cost_no_weight_gradient() -> None:
    model = painted_vae()
    model.encoder.requires_grad_(False)
    summary = summarise(model, SIZE)
    encoder, decoder = summary.parts
    assert (encoder.name, encoder.trainable) == ("encoder", 0)
    assert encoder.parameters == sum(p.numel() for p in model.encoder.parameters())
    assert (summary.parameters, summary.trainable) == (encoder.parameters + decoder.parameters, decoder.parameters)
    # z needs no gradient either
    assert summary.step_flops == ENCODER + 2 * (FROM_POSITION + FROM_SLOT) + 3 * (HIDDEN + OUT)


def test_stages_are_listed_in_the_order_of_the_data() -> None:
    stages = summarise(painted_vae("hessian"), SIZE, batch=5).stages
    assert stages[0] == Stage("images", (5, SIZE, SIZE, 3))
    names = [stage.name for stage in stages]
    assert names == ["images", "encoder.linear", "encoder", "decoder.painter", "decoder"]
    assert stages[-2:] == (
        Stage("decoder.painter", (5, SLOTS, PIXELS, 4)),
        Stage("decoder", (5, PIXELS, 3)),
    )


def test_a_model_whose_shapes_depend_on_values_is_run_for_real() -> None:
    """A patch decoder asked for some pixels decodes as many patches as they lie in."""
    config = replace(CONFIG, loss=LossConfig(penalty="hessian", penalty_pixels=4))
    model = SlotVAE(config, TinyEncoder(SIZE, SLOTS, 2 * DIM), PatchDecoder(DIM, SIZE, patch=2, **ATTENTION))
    whole = SlotVAE(replace(CONFIG, loss=LossConfig(penalty="hessian")), model.encoder, model.decoder)
    plain = SlotVAE(CONFIG, model.encoder, model.decoder)
    some, all_of_it, none = (summarise(each, SIZE).step_flops for each in (model, whole, plain))
    assert none < some < all_of_it
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_warm_up_does_not_hide_the_penalty() -> None:
    warm = replace(CONFIG, loss=LossConfig(penalty="hessian", alpha_warmup=10_000))
    model = painted_vae("hessian")
    assert training_flops(SlotVAE(warm, model.encoder, model.decoder), SIZE) == training_flops(model, SIZE)


def test_recomputed_activations_are_counted() -> None:
    model = painted_vae("hessian")
    recomputing = SlotVAE(replace(model.config, checkpoint_activations=True), model.encoder, model.decoder)
    assert training_flops(recomputing, SIZE) > training_flops(model, SIZE)


def test_a_supervised_encoder_has_no_decoder() -> None:
    config = SupervisedConfig(SIZE, SLOTS, DIM)
    factors = [Factor("shape_1", ("a", "b")), Factor("x_2")]
    summary = summarise(SupervisedEncoder(config, TinyEncoder(SIZE, SLOTS, DIM), factors), SIZE)
    assert summary.decoder_flops is None
    # 2 scores and 1 number from slots of width DIM
    assert summary.step_flops == 2 * (ENCODER // 2) + 3 * (2 * DIM * (2 + 1))
    assert [part.name for part in summary.parts] == ["encoder", "readouts"]


HIDDEN_WIDTH, WAVES, FEATURES, MIXER = 5, 7, 4, 6  # 7 wave vectors in a disc of radius 2, one of each pair
IN_SLOTS = 2 * SLOTS * HIDDEN_WIDTH * (DIM + HIDDEN_WIDTH + (FEATURES + 1) * 2 * WAVES + 2)
MOVED = 2 * SLOTS * 2 * (WAVES + PIXELS)  # places times waves, for the phases, and times pixels, for the discs
SERIES, COLOUR = 2 * SLOTS * (FEATURES + 1) * 2 * WAVES * PIXELS, 2 * PIXELS * MIXER * (FEATURES + 3)


@pytest.mark.parametrize(("penalty", "jets"), [("none", False), ("attention", False), ("hessian", True)])
def test_a_decoder_in_frames_costs_what_a_count_by_hand_says(penalty: Any, jets: bool) -> None:
    decoder = FrameDecoder(DIM, SIZE, SLOTS, hidden=HIDDEN_WIDTH, frequencies=2, features=FEATURES, mixer=MIXER)
    config = replace(CONFIG, loss=LossConfig(penalty=penalty))
    summary = summarise(SlotVAE(config, TinyEncoder(SIZE, SLOTS, 2 * DIM), decoder), SIZE)
    assert summary.decoder_flops == IN_SLOTS + MOVED + SERIES + COLOUR
    # Backward the tables of waves and pixels are given. Jets have two channels until slots meet in the masks, then 4.
    in_slots = 3 * IN_SLOTS + 2 * (MOVED + SERIES)
    assert summary.step_flops == 2 * ENCODER + (2 * in_slots + 4 * 3 * COLOUR if jets else in_slots + 3 * COLOUR)


@pytest.mark.parametrize("slots_by", ["dense", "attention"])
def test_a_model_in_replay_is_counted_before_its_bank_is_filled(slots_by: Any) -> None:
    encoder = EncoderConfig(width=8, downsample=2, slots_by=slots_by, slot_layers=1, slot_hidden=8)
    decoder = DecoderConfig(kind="broadcast_mlp", layers=2, query_dim=8, octaves=3)
    vae = SlotVAEConfig(8, 3, 4, encoder=encoder, decoder=decoder, loss=LossConfig(penalty="none"))
    summary = of_config(ReplayConfig(vae, bank=5))
    assert summary.decoder_flops is not None
    assert [part.name for part in summary.parts] == ["vae", "before"]
    assert summary.trainable == summary.parts[1].parameters and summary.parts[1].trainable == 0
    # One image in the old encoder, one in the decoder, two in the encoder that learns; its images need no gradient.
    once, learning = summary.encoder_flops + summary.decoder_flops, summary.step_flops
    assert 2 * 2.5 < (learning - once) / summary.encoder_flops < 2 * 3.1


def test_the_reference_model_is_counted_without_its_memory() -> None:
    """128×128 pixels, 7 slots, 12 heads of 43, with and without derivatives."""
    config = SlotVAEConfig(slot_dim=64, encoder=EncoderConfig(slot_layers=2))
    plain = of_config(replace(config, loss=LossConfig(penalty="none")))
    curved = of_config(replace(config, loss=LossConfig(penalty="hessian")))
    assert plain.decoder_flops == curved.decoder_flops
    assert plain.decoder_flops is not None and plain.encoder_flops is not None
    assert 2.9 < (plain.step_flops - 3 * plain.encoder_flops) / plain.decoder_flops < 3.1
    assert 2 * plain.step_flops < curved.step_flops < 5 * plain.step_flops


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_a_built_model_is_counted_as_it_runs(kind: Any) -> None:
    """Tensors without memory take the same way through the code as real ones."""
    encoder = EncoderConfig(kind=kind, width=8, downsample=2, patch=2, layers=1, heads=2, slot_layers=1, slot_heads=2)
    decoder = DecoderConfig(layers=2, heads=2, head_dim=5, query_dim=8, slot_hidden=10, octaves=3)
    model: Any = build(SlotVAEConfig(8, 3, 4, encoder=encoder, decoder=decoder, loss=LossConfig(penalty="hessian")))
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)

    def step() -> None:
        loss = model(images, step=1, draws=Draws.at(0, 0))["loss"]
        torch.autograd.grad(loss, list(model.parameters()))

    _, expected = _counted(step)
    assert training_flops(model, 8) == expected > 0


def test_a_model_that_runs_under_autocast_is_counted_like_any_other() -> None:
    model = painted_vae()
    expected = training_flops(model, SIZE)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    assert training_flops(model, SIZE) == expected


def test_a_generator_is_counted_by_its_tokens() -> None:
    """The trunk's products by hand: width W, T tokens, 12 W² in a layer's four matrices and 4 T W in its attention."""
    width, tokens, layers = 8, 4, 3
    factors = (Factor("size"),)
    one, more = (
        of_config(DiTConfig(2, TrunkConfig(width, layers * times, 2), channels=3), factors) for times in (1, 2)
    )
    per_token = 2 * 12 * width**2 + 4 * tokens * width
    # Backward there are two products for each forward, and attention computes q·k once more.
    step = 3 * tokens * per_token + 2 * tokens**2 * width
    modulation = 3 * 2 * 6 * width * width
    assert more.step_flops - one.step_flops == layers * (step + modulation)
    assert one.encoder_flops is None and one.decoder_flops is None
    assert one.stages[0] == Stage("tokens", (1, tokens, 3)) and Stage("trunk", (1, tokens, width)) in one.stages


@pytest.mark.parametrize("config", [MaskGITConfig(2, codes=5, jepa=JepaConfig((1,))), MARConfig(2), GIVTConfig(2)])
def test_what_a_generator_hides_at_random_is_counted_on_average(config: Any) -> None:
    """The same number each time, about that of a large batch."""
    config = replace(config, trunk=TrunkConfig(8, 2, 2))
    model = build(config, (Factor("shape", ("disc", "ring")), Factor("size")))
    found = training_flops(model, 32)
    assert found == training_flops(model, 32) == pytest.approx(training_flops(model, 32, 256), rel=0.2)
    assert all(parameter.grad is None for parameter in model.parameters())
    summary = of_config(config, model.factors)  # type: ignore[arg-type]
    assert summary.step_flops == found and summary.trainable < summary.parameters + (config.jepa is None)


def test_the_tables_say_it_all() -> None:
    console = Console(width=100, file=io.StringIO())
    model = painted_vae()
    model.encoder.requires_grad_(False)
    show(summarise(model, SIZE), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("encoder", "588", "all", "training step", "GFLOP", "decoder.painter", "1 × 3 × 16 × 4"):
        assert expected in text
