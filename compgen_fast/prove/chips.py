"""The GPUs that kernels are compiled for: what a multiprocessor holds, and what a whole GPU can do at most.

Limits give the occupancy of a compiled kernel, by the vendors' rules for how registers and shared memory are handed
out. Peaks are data-sheet figures, for models and never for claims. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """What a GPU of the architecture can do at most, by its data sheet."""

    name: str
    multiprocessors: int
    bandwidth: float  # bytes per second from its memory
    cache: int  # bytes of L2
    matrix: float  # FLOP/s of dense bf16 products on the matrix units
    vector: float  # FLOP/s of fp32 elsewhere


@dataclass(frozen=True)
class Chip:
    """What one multiprocessor holds. A warp is AMD's wavefront, a block its workgroup, shared memory its LDS."""

    name: str
    warp_size: int
    units: int  # into which registers and warps are divided: a warp lives in one of them
    registers: int  # 32-bit ones, per unit
    register_granularity: int  # registers of a warp come in multiples of so many
    warps: int
    blocks: int
    shared: int  # bytes
    shared_granularity: int
    shared_reserved: int  # bytes that each block takes beside its own
    shared_per_block: int
    peak: Peak


A100 = Peak(
    # NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB); L2 and multiprocessors: A100 architecture white paper
    "A100 SXM 80 GB",
    multiprocessors=108,
    bandwidth=2.039e12,
    cache=40 << 20,
    matrix=312e12,
    vector=19.5e12,
)
H100 = Peak(
    # NVIDIA H100 Tensor Core GPU data sheet (SXM; half of what it gives with sparsity); H100 architecture white paper
    "H100 SXM",
    multiprocessors=132,
    bandwidth=3.35e12,
    cache=50 << 20,
    matrix=989.4e12,
    vector=66.9e12,
)
B200 = Peak(
    # NVIDIA DGX B200 data sheet, an eighth of it (dense: half of what it gives with sparsity); L2 and multiprocessors:
    # NVIDIA Blackwell tuning guide
    "B200",
    multiprocessors=148,
    bandwidth=8e12,
    cache=126 << 20,
    matrix=2250e12,
    vector=75e12,
)
MI300X = Peak(
    # AMD Instinct MI300X data sheet; L2: AMD CDNA 3 architecture white paper, 4 MB in each of 8 dies
    "MI300X",
    multiprocessors=304,
    bandwidth=5.3e12,
    cache=32 << 20,
    matrix=1307.4e12,
    vector=163.4e12,
)


def _nvidia(name: str, shared: int, peak: Peak) -> Chip:
    """CUDA C++ programming guide, table of technical specifications per compute capability; granularities: the
    occupancy calculator of Nsight Compute. 64 K registers in four units, of which a warp takes multiples of 256.
    """
    kilobyte = 1 << 10
    return Chip(
        name,
        warp_size=32,
        units=4,
        registers=16 * kilobyte,
        register_granularity=256,
        warps=64,
        blocks=32,
        shared=shared * kilobyte,
        shared_granularity=128,
        shared_reserved=kilobyte,
        shared_per_block=(shared - 1) * kilobyte,
        peak=peak,
    )


CHIPS = {
    "sm_80": _nvidia("sm_80", 164, A100),
    "sm_90": _nvidia("sm_90", 228, H100),
    "sm_100": _nvidia("sm_100", 228, B200),
    # AMD CDNA 3 instruction set reference; LLVM's AMDGPU backend (AMDGPUBaseInfo, gfx90a and later): four units of 512
    # registers in each of 64 lanes, eight at a time; 8 wavefronts a unit; 16 barriers, so as many blocks.
    "gfx942": Chip(
        "gfx942",
        warp_size=64,
        units=4,
        registers=512 * 64,
        register_granularity=8 * 64,
        warps=32,
        blocks=16,
        shared=64 << 10,
        shared_granularity=512,
        shared_reserved=0,
        shared_per_block=64 << 10,
        peak=MI300X,
    ),
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks run side by side in a multiprocessor, the share of its warps that they are, and what limits."""

    blocks: int
    share: float
    limit: str


def occupancy(chip: Chip, registers: int, shared: int, warps: int) -> Occupancy:
    """Of a kernel with so many registers per thread, bytes of shared memory and warps per block."""
    if registers < 1 or warps < 1:
        raise ValueError(f"occupancy: {registers} registers and {warps} warps; expected at least 1 of each")
    room = {
        "registers": chip.units
        * (chip.registers // _rounded(registers * chip.warp_size, chip.register_granularity))
        // warps,
        "shared memory": chip.shared // (_rounded(shared, chip.shared_granularity) + chip.shared_reserved)
        if shared or chip.shared_reserved
        else chip.blocks,
        "warps": chip.warps // warps,
        "blocks": chip.blocks,
    }
    blocks = min(room.values())
    limit = next(what for what in ("warps", "blocks", "registers", "shared memory") if room[what] == blocks)
    return Occupancy(blocks, blocks * warps / chip.warps, limit)


def _rounded(amount: int, granularity: int) -> int:
    return -(-amount // granularity) * granularity
