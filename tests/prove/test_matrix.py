"""Tiles and their products, spread over a warp as the matrix units want them."""

import numpy as np
import pytest
import torch

from compgen_fast.prove.emulator.arithmetic import bf16_bits, bf16_value
from tests.prove.snippets import run

RANDOM = np.random.default_rng(1)
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def half(values: np.ndarray, kind: str) -> np.ndarray:
    return (bf16_bits(values) if kind == "bf16" else values.astype(np.float16).view(np.uint16)).astype(np.uint32)


def pair(matrix: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    return matrix[row, column] | matrix[row, column + 1] << np.uint32(16)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_products_of_16_bit_tiles(kind):
    A, B, C = (RANDOM.normal(size=size).astype(np.float32) for size in ((16, 16), (16, 8), (16, 8)))
    a, b = half(A, kind), half(B.T, kind)
    start = {f"r{1 + j}": pair(a, G + 8 * (j % 2), 2 * T + 8 * (j // 2)) for j in range(4)}
    start |= {f"r{5 + j}": pair(b, G, 2 * T + 8 * j) for j in range(2)}
    start |= {f"r{7 + j}": C[G + 8 * (j // 2), 2 * T + j % 2].view(np.uint32) for j in range(4)}
    block = run(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r11, %r12, %r13, %r14}}, {{%r1, %r2, %r3, %r4}}, "
        "{%r5, %r6}, {%r7, %r8, %r9, %r10};",
        **start,
    )
    rounded = bf16_value if kind == "bf16" else lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float32)
    expected = C + rounded(a).astype(np.float64) @ rounded(b).T.astype(np.float64)
    for j in range(4):
        found = block.registers[f"%r{11 + j}"].view(np.float32)
        np.testing.assert_allclose(found, expected[G + 8 * (j // 2), 2 * T + j % 2], rtol=1e-6, atol=1e-6)


def test_products_of_tf32_tiles_see_ten_bits():
    A, B = RANDOM.normal(size=(16, 8)).astype(np.float32), RANDOM.normal(size=(8, 8)).astype(np.float32)
    start = {f"r{1 + j}": A[G + 8 * (j % 2), T + 4 * (j // 2)].view(np.uint32) for j in range(4)}
    start |= {f"r{5 + j}": B[T + 4 * j, G].view(np.uint32) for j in range(2)}
    block = run(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r11, %r12, %r13, %r14}, {%r1, %r2, %r3, %r4}, "
        "{%r5, %r6}, {%r7, %r7, %r7, %r7};",
        r7=np.zeros(32, np.uint32),
        **start,
    )
    cut = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for x in (A, B)]
    found = block.registers["%r11"].view(np.float32)
    np.testing.assert_allclose(found, (cut[0] @ cut[1])[G, 2 * T], rtol=1e-6, atol=1e-6)
    assert not np.allclose(found, (A @ B)[G, 2 * T], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trans", [False, True])
def test_tiles_are_loaded_by_the_rows_that_threads_name(trans):
    """Stored row by row through shared memory, four tiles one below the other."""
    rows = torch.arange(32 * 8, dtype=torch.int16).view(32, 8).numpy().view(np.uint32)  # two numbers to a register
    block = run(
        "mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 4;\nst.shared.v4.b32 [%r2], {%r3, %r4, %r5, %r6};\nbar.sync 0;\n"
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if trans else ''}.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r2];",
        **{f"r{3 + j}": np.ascontiguousarray(rows[:, j]) for j in range(4)},
    )
    for j in range(4):
        tile = np.arange(64).reshape(8, 8) + 64 * j
        tile = tile.T if trans else tile
        assert (block.registers[f"%r{7 + j}"] == (tile[G, 2 * T] | tile[G, 2 * T + 1] << 16)).all()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_tiles_that_are_stored_are_those_that_are_loaded(trans):
    """Two tiles of 8×8, rows 16 bytes apart; read back as they lie in shared memory."""
    tiles = RANDOM.integers(0, 1 << 16, size=(2, 8, 8)).astype(np.uint32)
    start = {f"r{1 + j}": pair(tiles[j], G, 2 * T) for j in range(2)}
    block = run(
        f"stmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 [%r9], {{%r1, %r2}};",
        r9=(16 * LANE).astype(np.uint32),
        **start,
    )
    lie = block.shared.content[:256].view(np.uint16).reshape(2, 8, 8)
    np.testing.assert_array_equal(lie, tiles.swapaxes(1, 2) if trans else tiles)
    assert block.shared.defined[:256].all() and not block.shared.defined[256:].any()
