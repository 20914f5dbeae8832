"""Numbers as the GPU's instructions calculate them."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.prove.snippets import floats, run

RANDOM = np.random.default_rng(0)


def result(body: str, register: str = "%r9", **start: np.ndarray) -> np.ndarray:
    return run(body, **start).registers[register]


def integers(*values: int) -> np.ndarray:
    return np.resize(np.array([value & 0xFFFFFFFF for value in values], np.uint32), 32)


def test_fma_is_rounded_once():
    for _ in range(20):
        x, y = (RANDOM.normal(size=32).astype(np.float32) for _ in range(2))
        z = (-(x.astype(np.float64) * y) * (1 + RANDOM.normal(size=32) * 2.0**-24)).astype(np.float32)
        found = result(
            "fma.rn.f32 %r9, %r1, %r2, %r3;", r1=x.view(np.uint32), r2=y.view(np.uint32), r3=z.view(np.uint32)
        )
        for a, b, c, got in zip(x, y, z, found.view(np.float32), strict=True):
            exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
            off = abs(Fraction(float(got)) - exact)
            assert all(
                off <= abs(Fraction(float(np.nextafter(got, np.float32(way)))) - exact) for way in (-np.inf, np.inf)
            )


def test_fma_of_a_sum_in_the_middle_of_two_floats():
    """Where rounding to fp64 first would make a tie of what is none."""
    one, tiny = np.float32(1), np.float32(2.0**-60)
    found = result("fma.rn.f32 %r9, %r1, %r2, %r3;", r1=floats(1 + 2.0**-23), r2=floats(1 + 2.0**-1), r3=floats(tiny))
    exact = Fraction(float(np.float32(1 + 2.0**-23))) * Fraction(3, 2) + Fraction(float(tiny))
    near = [np.float32(found.view(np.float32)[0]), np.nextafter(found.view(np.float32)[0], one)]
    assert abs(Fraction(float(near[0])) - exact) < abs(Fraction(float(near[1])) - exact)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("add.f32 %r9, %r1, %r2;", 1.5 + -2.25), ("sub.f32 %r9, %r1, %r2;", 3.75), ("mul.f32 %r9, %r1, %r2;", -3.375),
        ("div.rn.f32 %r9, %r1, %r2;", np.float32(1.5) / np.float32(-2.25)), ("max.f32 %r9, %r1, %r2;", 1.5),
        ("min.f32 %r9, %r1, %r2;", -2.25), ("neg.f32 %r9, %r1;", -1.5), ("abs.f32 %r9, %r2;", 2.25),
        ("ex2.approx.f32 %r9, %r1;", np.float32(2**1.5)), ("sqrt.approx.ftz.f32 %r9, %r1;", np.sqrt(np.float32(1.5))),
    ],
)  # fmt: skip
def test_floats(line, expected):
    assert (result(line, r1=floats(1.5), r2=floats(-2.25)).view(np.float32) == np.float32(expected)).all()


def test_max_ignores_nan_and_ftz_flushes_the_very_small():
    assert (result("max.f32 %r9, %r1, %r2;", r1=floats(np.nan), r2=floats(3)).view(np.float32) == 3).all()
    small = floats(1e-40)
    assert (result("add.f32 %r9, %r1, %r1;", r1=small).view(np.float32) > 0).all()
    assert (result("add.ftz.f32 %r9, %r1, %r1;", r1=small) == 0).all()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("add.s32 %r9, %r1, %r2;", 0xFFFFFFFF), ("sub.s32 %r9, %r2, %r1;", 13), ("mul.lo.s32 %r9, %r1, %r2;", -42),
        ("mul.hi.s32 %r9, %r1, %r2;", -1), ("mul.hi.u32 %r9, %r1, %r2;", 5), ("mad.lo.s32 %r9, %r1, %r2, 2;", -40),
        ("div.s32 %r9, %r1, 2;", -3), ("rem.s32 %r9, %r1, 4;", -3), ("min.s32 %r9, %r1, %r2;", -7),
        ("max.u32 %r9, %r1, %r2;", -7), ("and.b32 %r9, %r1, 12;", 8), ("or.b32 %r9, %r2, 9;", 15),
        ("xor.b32 %r9, %r2, 5;", 3), ("not.b32 %r9, %r2;", -7), ("shl.b32 %r9, %r2, 4;", 96),
        ("shl.b32 %r9, %r2, 32;", 0),
        ("shr.s32 %r9, %r1, 1;", -4), ("shr.s32 %r9, %r1, 40;", -1), ("shr.u32 %r9, %r1, 28;", 15),
        ("bfe.u32 %r9, %r1, 1, 3;", 4), ("bfe.s32 %r9, %r1, 0, 3;", 1), ("bfe.s32 %r9, %r1, 1, 3;", -4),
        ("neg.s32 %r9, %r2;", -6),
    ],
)  # fmt: skip
def test_integers(line, expected):
    """Of −7 and 6; −7 is …11111001."""
    assert (result(line, r1=integers(-7), r2=integers(6)) == np.uint32(expected & 0xFFFFFFFF)).all()


def test_wide_products_keep_64_bits():
    found = result("mul.wide.s32 %rd9, %r1, %r2;", "%rd9", r1=integers(-(2**20)), r2=integers(2**20)).view(np.int64)
    assert (found == -(2**40)).all()
    found = result("mad.wide.u32 %rd9, %r1, 8, %rd1;", "%rd9", r1=integers(2**31), rd1=np.full(32, 5, np.uint64))
    assert (found == 2**34 + 5).all()


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        ("lt", [1, 0, 0, 0]), ("le", [1, 1, 0, 0]), ("eq", [0, 1, 0, 0]), ("ne", [1, 0, 1, 0]), ("gt", [0, 0, 1, 0]),
        ("equ", [0, 1, 0, 1]), ("neu", [1, 0, 1, 1]), ("geu", [0, 1, 1, 1]), ("num", [1, 1, 1, 0]),
        ("nan", [0, 0, 0, 1]),
    ],
)  # fmt: skip
def test_comparisons_with_nan(comparison, expected):
    found = result(f"setp.{comparison}.f32 %p9, %r1, %r2;", "%p9", r1=floats(1, 2, 3, np.nan), r2=floats(2))
    assert found[:4].tolist() == [bool(each) for each in expected]


def test_comparisons_of_halves_are_of_floats():
    """As whole numbers, −2 would be more than 1."""
    start = {"rs1": np.full(32, 0xC000, np.uint16), "rs2": np.full(32, 0x3C00, np.uint16)}
    for kind in ("f16", "bf16"):
        assert result(f"setp.lt.{kind} %p9, %rs1, %rs2;", "%p9", **start).all()


def test_comparisons_know_signs():
    start = {"r1": integers(-1), "r2": integers(1)}
    assert result("setp.lt.s32 %p9, %r1, %r2;", "%p9", **start).all()
    assert not result("setp.lt.u32 %p9, %r1, %r2;", "%p9", **start).any()


def test_bf16_is_rounded_as_torch_rounds_it():
    values = np.concatenate([RANDOM.normal(size=29), [np.inf, np.nan, 1 + 2.0**-8]]).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    found = result("cvt.rn.bf16.f32 %rs9, %r1;", "%rs9", r1=values.view(np.uint32))
    assert torch.equal(
        torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).nan_to_num(9.0), expected.nan_to_num(9.0)
    )
    packed = result("cvt.rn.bf16x2.f32 %r9, %r1, %r2;", r1=floats(1.0), r2=floats(-2.0))
    assert (packed == 0x3F80C000).all()
    assert (result("cvt.f32.bf16 %r9, %rs1;", rs1=np.full(32, 0xC000, np.uint16)).view(np.float32) == -2).all()


def test_conversions():
    assert (result("cvt.s64.s32 %rd9, %r1;", "%rd9", r1=integers(-3)).view(np.int64) == -3).all()
    assert (result("cvt.u64.u32 %rd9, %r1;", "%rd9", r1=integers(-3)) == 2**32 - 3).all()
    assert (result("cvt.rn.f32.s32 %r9, %r1;", r1=integers(-3)).view(np.float32) == -3).all()
    assert (result("cvt.rzi.s32.f32 %r9, %r1;", r1=floats(-3.7)).view(np.int32) == -3).all()
    assert (result("cvt.rn.f16x2.f32 %r9, %r1, %r2;", r1=floats(1), r2=floats(0.5)) == 0x3C003800).all()


def test_registers_are_taken_apart_and_put_together():
    block = run(
        "mov.b32 {%rs1, %rs2}, %r1;\nmov.b32 %r2, {%rs2, %rs1};\nmov.b64 %rd1, {%r1, %r2};", r1=integers(0x12345678)
    )
    assert (block.registers["%rs1"] == 0x5678).all() and (block.registers["%r2"] == 0x56781234).all()
    assert (block.registers["%rd1"] == 0x5678123412345678).all()


def test_bytes_are_permuted():
    start = {"r1": integers(0x33221100), "r2": integers(0x77665588)}
    assert (result("prmt.b32 %r9, %r1, %r2, 0x7531;", **start) == 0x77553311).all()
    assert (result("prmt.b32 %r9, %r1, %r2, 0x0C40;", **start) == 0x00FF8800).all()
    assert (result("selp.b32 %r9, 5, 6, %p1;", p1=np.resize([True, False], 32))[:2] == [5, 6]).all()


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_comparisons_of_pairs(kind):
    """The lower half decides the first predicate, the upper one the second; nothing is greater than NaN."""
    dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
    a, b = (
        torch.tensor(values, dtype=dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        for values in ([1.0, 3.0, float("nan"), -1.0], [2.0, 2.0, 2.0, -2.0])
    )
    low_high = [each[[0, 2]] | each[[1, 3]] << np.uint32(16) for each in (a, b)]
    block = run(f"setp.gt.{kind} %p1|%p2, %r1, %r2;", r1=np.resize(low_high[0], 32), r2=np.resize(low_high[1], 32))
    assert block.registers["%p1"][:2].tolist() == [False, False]
    assert block.registers["%p2"][:2].tolist() == [True, True]
