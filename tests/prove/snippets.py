"""A few lines of PTX as a kernel, and a block of threads that runs them."""

import numpy as np

from compgen_fast.prove.emulator import Block, GlobalMemory, Memory, Program, parse

BASE = 0x1000


def program(body: str, threads: int = 32) -> Program:
    lines = "\n".join(f"\t{line.strip()}" for line in body.strip().splitlines())
    return parse(f".visible .entry k(\n\t.param .u64 k_param_0\n)\n.reqntid {threads}\n{{\n{lines}\n}}\n")


def buffer(size: int = 256, *, defined: bool = True) -> Memory:
    return Memory(np.zeros(size, np.uint8), "x", defined=defined, base=BASE)


def run(body: str, *, threads: int = 32, memory: Memory | None = None, blocks: int = 1, **start: np.ndarray) -> Block:
    """The last block after the body; a keyword r1 sets %r1 beforehand. The parameter is where ``memory`` begins."""
    for number in range(blocks):
        shared = Memory(np.zeros(1024, np.uint8), "shared memory", defined=False)
        whole = GlobalMemory([memory or buffer()])
        block = Block(program(body, threads), [BASE], whole, shared, (number, 0, 0), (blocks, 1, 1))
        block.registers |= {f"%{name}": np.ascontiguousarray(value) for name, value in start.items()}
        block.run()
    return block


def floats(*values: float) -> np.ndarray:
    """32 threads' registers: the values given, again and again."""
    return np.resize(np.array(values, np.float32), 32).view(np.uint32)
