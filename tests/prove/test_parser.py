"""PTX as text and as instructions."""

import pytest

from compgen_fast.prove.emulator.parser import address, parse, registers, split
from tests.prove.snippets import program


def test_an_instruction_has_guard_opcode_operands_and_its_line_of_the_source():
    (found,) = program(".loc 1 72 24 // adam.py:72:24\n@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd3+16];").instructions
    assert (found.op, found.parts, found.type, found.count) == ("ld", ("global", "v2", "b32"), "b32", 2)
    assert (found.guard, found.negated, found.operands) == ("%p1", True, ("{%r1, %r2}", "[%rd3+16]"))
    assert found.source == "adam.py:72"


def test_labels_are_places_among_instructions_and_directives_are_none():
    found = program(".reg .b32 %r<3>;\nmov.b32 %r1, 1;\n$L1:\nmov.b32 %r2, 2;\nbra $L1;")
    assert found.labels == {"$L1": 1} and [each.op for each in found.instructions] == ["mov", "mov", "bra"]


def test_operands_are_split_outside_of_braces_and_brackets():
    assert split("{%r1, %r2}, [%rd3 + 16], 0x4, %r7") == ("{%r1, %r2}", "[%rd3 + 16]", "0x4", "%r7")
    assert registers("{ %r1, %r2 }") == ("%r1", "%r2") and registers("%r5") == ("%r5",)
    assert address("[ %rd3 + 16 ]") == ("%rd3", 16) and address("[%rd3]") == ("%rd3", 0)
    assert address("[%rd3+-8]") == ("%rd3", -8)


def test_what_is_not_ptx_is_refused():
    with pytest.raises(ValueError, match=r"no \.visible \.entry"):
        parse("int main() {}")
