"""Occupancy as the vendors' calculators give it, by hand."""

import pytest

from compgen_fast.prove.chips import CHIPS, Occupancy, occupancy

KB = 1 << 10


@pytest.mark.parametrize(
    ("chip", "registers", "shared", "warps", "expected"),
    [
        # 32 registers · 32 threads = 1024 of 65536 a warp: 64 warps, all there are, in blocks of 4
        ("sm_80", 32, 0, 4, Occupancy(16, 1.0, "warps")),
        # 2048 a warp: 32 warps
        ("sm_80", 64, 0, 4, Occupancy(8, 0.5, "registers")),
        # 33 · 32 = 1056, rounded up to 1280: 12 warps in each of four units of 16384
        ("sm_80", 33, 0, 4, Occupancy(12, 0.75, "registers")),
        # 255 · 32 = 8160, rounded up to 8192: 8 warps
        ("sm_80", 255, 0, 4, Occupancy(2, 0.125, "registers")),
        # 152 · 32 = 4864: 65536 hold 13, but a warp is in one of four units, each with room for three
        ("sm_80", 152, 0, 1, Occupancy(12, 0.1875, "registers")),
        # 12 warps again, but blocks of 8
        ("sm_80", 168, 0, 8, Occupancy(1, 0.125, "registers")),
        # 48 KB and the system's 1 KB: 3 of 49 KB in 164 KB
        ("sm_80", 32, 48 * KB, 4, Occupancy(3, 0.1875, "shared memory")),
        # the same in 228 KB
        ("sm_90", 32, 48 * KB, 4, Occupancy(4, 0.25, "shared memory")),
        ("sm_100", 32, 227 * KB, 4, Occupancy(1, 0.0625, "shared memory")),
        # single warps: 32 blocks are all that fit
        ("sm_90", 16, 0, 1, Occupancy(32, 0.5, "blocks")),
        # does not fit at all
        ("sm_80", 32, 164 * KB, 4, Occupancy(0, 0.0, "shared memory")),
        # 512 registers a lane: 128 each let 4 waves live in each of 4 units
        ("gfx942", 128, 0, 4, Occupancy(4, 0.5, "registers")),
        ("gfx942", 64, 0, 4, Occupancy(8, 1.0, "warps")),
        # 129 are rounded up to 136: 3 waves
        ("gfx942", 129, 0, 4, Occupancy(3, 0.375, "registers")),
        # LDS: 24 KB go twice into 64
        ("gfx942", 64, 24 * KB, 4, Occupancy(2, 0.25, "shared memory")),
        # two waves a block: as many blocks as there are barriers
        ("gfx942", 16, 0, 2, Occupancy(16, 1.0, "warps")),
    ],
)
def test_occupancy_follows_the_vendors_rules(
    chip: str, registers: int, shared: int, warps: int, expected: Occupancy
) -> None:
    assert occupancy(CHIPS[chip], registers, shared, warps) == expected


def test_a_kernel_without_warps_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        occupancy(CHIPS["sm_80"], 32, 0, 0)
