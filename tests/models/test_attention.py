"""Attention without a mask: right, and served by whom it should be."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from compgen_fast.models import attention
from compgen_fast.models.attention import attention_backend, cross_attention, self_attention


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)


def tensors(B: int, M: int, N: int, H: int, D: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(B, count, H, D, dtype=dtype, requires_grad=True) for count in (M, N, N)]


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 43))
def test_self_attention_and_its_gradients_are_the_formula(B: int, N: int, H: int, D: int) -> None:
    inputs = tensors(B, N, N, H, D)
    out, expected = self_attention(*inputs), naive(*inputs)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, direction) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_queries_may_be_fewer_than_keys() -> None:
    inputs = tensors(2, 7, 50, 3, 43)
    torch.testing.assert_close(cross_attention(*inputs), naive(*inputs))


def test_derivatives_of_second_order_are_right_where_the_fused_kernels_are_switched_off() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(self_attention, tensors(1, 3, 3, 2, 3))


def test_autocast_reaches_the_kernel() -> None:
    inputs = tensors(1, 6, 6, 2, 8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = self_attention(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), naive(*inputs), atol=0.05, rtol=0.05)


def test_it_compiles_as_one_graph() -> None:
    inputs = tensors(2, 6, 6, 2, 8, torch.float32)
    compiled = torch.compile(self_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), self_attention(*inputs))


def test_shapes_that_do_not_fit_are_named() -> None:
    q, k, v = tensors(2, 7, 50, 3, 4)
    with pytest.raises(ValueError, match=r"\[2, 7, 3, 4\], \[2, 50, 3, 4\].*use cross_attention"):
        self_attention(q, k, v)
    for wrong in (q[:1], q[:, :, :2], q[..., :2], q[0]):
        with pytest.raises(ValueError, match=r"expected q \[B, M, H, D\]"):
            cross_attention(wrong, k, v)


class FakeFlash(ModuleType):
    """A flash_attn that computes by formula and remembers its calls."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.__spec__ = ModuleSpec("flash_attn", None)
        self.calls: list[bool] = []
        self.dtypes: list[torch.dtype] = []

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool) -> Tensor:
        self.calls.append(deterministic)
        self.dtypes.append(q.dtype)
        return naive(q, k, v)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """flash-attn is installed, beside a GPU that it knows."""
    fake = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    attention.flash_installed.cache_clear()
    yield fake
    attention.flash_installed.cache_clear()


class OnGpu:
    """The looks of a tensor on a GPU, as far as the choice of a kernel goes."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16, head_width: int = 64) -> None:
        self.dtype, self.shape = dtype, (2, 100, 4, head_width)


def test_flash_attention_computes_where_it_serves(flash: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_serves", lambda q: True)
    inputs = tensors(2, 5, 5, 2, 4)
    torch.testing.assert_close(self_attention(*inputs), naive(*inputs))
    assert flash.calls == [False]


def test_flash_attention_gets_what_autocast_makes_of_the_inputs(
    flash: FakeFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_serves", lambda q: q.dtype == torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        self_attention(*tensors(2, 5, 5, 2, 4, torch.float32))
    assert flash.dtypes == [torch.bfloat16]


def test_flash_attention_is_deterministic_where_torch_is(flash: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_serves", lambda q: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    self_attention(*tensors(2, 5, 5, 2, 4))
    assert flash.calls == [True]


def test_flash_attention_serves_half_precision_on_a_gpu_and_nothing_else(flash: FakeFlash) -> None:
    assert attention.flash_serves(OnGpu()) and attention.flash_serves(OnGpu(torch.float16, 256))
    assert not attention.flash_serves(OnGpu(torch.float32))
    assert not attention.flash_serves(OnGpu(head_width=257))
    assert not attention.flash_serves(torch.ones(1, 1, 1, 8, dtype=torch.bfloat16))


def test_flash_attention_stands_back_where_second_derivatives_are_asked_for(flash: FakeFlash) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert not attention.flash_serves(OnGpu())


def test_the_backend_of_a_device_comes_with_its_reason(flash: FakeFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_backend("cpu") == ("torch", "flash-attn has no CPU kernels")
    name, reason = attention_backend(torch.device("cuda", 0))
    assert name == "flash-attn" and "256" in reason

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    name, reason = attention_backend("cuda")
    assert name == "torch" and "8.0" in reason
    assert not attention.flash_serves(OnGpu())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention_backend("cuda") == ("torch", "no CUDA or ROCm device")


def test_flash_attention_that_is_not_installed_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "flash_installed", lambda: False)
    name, reason = attention_backend("cuda")
    assert name == "torch" and "pip install" in reason
