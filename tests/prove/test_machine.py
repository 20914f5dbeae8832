"""Threads that go their own ways, wait for each other, and shuffle."""

import numpy as np
import pytest

from compgen_fast.prove.emulator import Fault
from tests.prove.snippets import buffer, floats, run


def test_threads_that_part_meet_again():
    block = run("""
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 10;
        @%p1 bra $L1;
        add.s32 %r2, %r1, 100;
        bra.uni $L2;
        $L1:
        add.s32 %r2, %r1, 200;
        $L2:
        add.s32 %r3, %r2, 1;
        ret;
    """)
    threads = np.arange(32)
    assert block.registers["%r3"].tolist() == np.where(threads < 10, threads + 201, threads + 101).tolist()
    assert block.executed["add.s32"] == 3


def test_a_loop_ends_for_each_thread_when_it_is_done():
    block = run("""
        mov.u32 %r1, %tid.x;
        mov.b32 %r2, 0;
        $L1:
        add.s32 %r2, %r2, 2;
        add.s32 %r1, %r1, -1;
        setp.gt.s32 %p1, %r1, 0;
        @%p1 bra $L1;
        ret;
    """)
    assert block.registers["%r2"].tolist() == [2 * max(1, thread) for thread in range(32)]


def test_a_guard_leaves_other_threads_as_they_were():
    block = run("mov.u32 %r1, %tid.x;\nmov.b32 %r2, 7;\nsetp.eq.b32 %p1, %r1, 3;\n@!%p1 mov.b32 %r2, 9;")
    assert block.registers["%r2"].tolist() == [7 if thread == 3 else 9 for thread in range(32)]


def test_what_was_never_written_is_no_number():
    block = run("mov.u32 %r1, %tid.x;\nsetp.eq.b32 %p1, %r1, 3;\n@%p1 mov.b32 %r2, 0;\nadd.f32 %r3, %r2, %r2;")
    result = block.registers["%r3"].view(np.float32)
    assert result[3] == 0 and np.isnan(np.delete(result, 3)).all()


EXCHANGE = """
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    st.shared.b32 [%r2], %r1;
    {barrier}
    xor.b32 %r3, %r1, 32;
    shl.b32 %r4, %r3, 2;
    ld.shared.b32 %r5, [%r4];
    ret;
"""


def test_a_barrier_brings_what_another_warp_wrote():
    block = run(EXCHANGE.format(barrier="bar.sync 0;"), threads=64)
    assert block.registers["%r5"].tolist() == [thread ^ 32 for thread in range(64)] and block.epoch == 1


def test_a_missing_barrier_is_a_race():
    with pytest.raises(Fault, match="race: load of byte 128 of shared memory and a write of it by another warp"):
        run(EXCHANGE.format(barrier=""), threads=64)


def test_threads_that_are_done_are_not_waited_for():
    block = run("mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;\n@%p1 ret;\nbar.sync 0;\nmov.b32 %r2, 1;", threads=64)
    assert block.registers["%r2"][32:].tolist() == [1] * 32


def test_a_fault_names_the_line_of_the_source_and_the_block():
    with pytest.raises(
        Fault, match=r"^adam\.py:7, block 0: load of 4 bytes at byte 1024 of shared memory.* \(ld\.shared"
    ):
        run(".loc 1 7 3 // adam.py:7:3\nmov.b32 %r1, 1000;\nld.shared.b32 %r2, [%r1+24];")


def test_blocks_that_write_the_same_place_race():
    body = "ld.param.b64 %rd1, [k_param_0];\nmov.u32 %r1, %ctaid.x;\n{where}\nst.global.b32 [%rd2], %r1;"
    memory = buffer()
    run(body.format(where="mad.wide.u32 %rd2, %r1, 4, %rd1;"), memory=memory, blocks=3)
    assert memory.content[:12].view(np.uint32).tolist() == [0, 1, 2]
    with pytest.raises(Fault, match="another block"):
        run(body.format(where="mov.b64 %rd2, %rd1;"), memory=buffer(), blocks=3)


def test_shuffles_read_the_neighbour_and_the_one_named():
    block = run(
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\nshfl.sync.idx.b32 %r3|%p1, %r1, 5, 31, -1;", r1=floats(*range(32))
    )
    assert block.registers["%r2"].view(np.float32).tolist() == [thread ^ 1 for thread in range(32)]
    assert (block.registers["%r3"].view(np.float32) == 5).all()


def test_half_a_warp_cannot_shuffle():
    with pytest.raises(Fault, match="shfl by part of a warp"):
        run("mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;")


def test_redux_is_one_number_of_each_warp():
    block = run("mov.u32 %r1, %tid.x;\nneg.s32 %r2, %r1;\nredux.sync.max.s32 %r3, %r2, -1;", threads=64)
    assert block.registers["%r3"].view(np.int32).tolist() == [0] * 32 + [-32] * 32


def test_an_asynchronous_copy_arrives_when_it_was_waited_for():
    body = """
        mov.u32 %r1, %tid.x;
        shl.b32 %r2, %r1, 2;
        ld.param.b64 %rd1, [k_param_0];
        mad.wide.u32 %rd2, %r1, 4, %rd1;
        cp.async.ca.shared.global [%r2+0], [%rd2+0], 0x4;
        cp.async.commit_group;
        {wait}
        ld.shared.b32 %r3, [%r2];
    """
    memory = buffer()
    memory.content[:128] = np.arange(32, dtype=np.uint32).view(np.uint8)
    assert run(body.format(wait="cp.async.wait_group 0;"), memory=memory).registers["%r3"].tolist() == list(range(32))
    with pytest.raises(Fault, match="not waited for"):
        run(body.format(wait="cp.async.wait_group 1;"), memory=memory)


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match=r"does not know 'frobnicate\.b32 %r1, 3'"):
        run("frobnicate.b32 %r1, 3;")
