"""Executes compiled kernels on the CPU, from the PTX that a GPU's driver would be given: rung 5 of the ladder."""

from compgen_fast.prove.emulator import arithmetic, control, matrix, movement  # noqa: F401  they register instructions
from compgen_fast.prove.emulator.machine import Block
from compgen_fast.prove.emulator.memory import Fault, GlobalMemory, Memory
from compgen_fast.prove.emulator.parser import Program, parse

__all__ = ["Block", "Fault", "GlobalMemory", "Memory", "Program", "parse"]
