"""What memory notices."""

import numpy as np
import pytest

from compgen_fast.prove.emulator.memory import Fault, GlobalMemory, Memory, Who
from tests.prove.snippets import BASE, buffer


def who(*warps: int, block: int = 0, epoch: int = 0) -> Who:
    return Who(block, epoch, np.array(warps or (0,)))


def at(*offsets: int) -> np.ndarray:
    return BASE + np.array(offsets or (0,))


def value(*numbers: int) -> np.ndarray:
    return np.array(numbers or (7,), np.uint32)[:, None].view(np.uint8)


def test_what_was_stored_is_loaded():
    memory = buffer()
    memory.store(at(8, 0), value(5, 6), who(0, 0))
    assert memory.load(at(0, 8), 4, who(0, 0)).view(np.uint32).tolist() == [[6], [5]]


@pytest.mark.parametrize("offset", [-4, 256, 1000])
def test_an_access_beyond_the_buffer_is_a_fault(offset):
    with pytest.raises(Fault, match=f"load of 4 bytes at byte {offset} of x, which has 256"):
        buffer().load(at(offset), 4, who())


def test_an_access_that_begins_inside_and_ends_outside_is_a_fault():
    with pytest.raises(Fault, match="store of 4 bytes at byte 4 of x, which has 6"):
        buffer(6).store(at(4), value(), who())


def test_a_misaligned_access_is_a_fault():
    with pytest.raises(Fault, match="at byte 2 of x: the address is not a multiple of 4"):
        buffer().load(at(2), 4, who())


def test_bytes_that_nobody_wrote_are_not_read():
    memory = buffer(defined=False)
    with pytest.raises(Fault, match="byte 4 of x, which nobody has written"):
        memory.load(at(4), 4, who())
    memory.store(at(4), value(), who())
    memory.load(at(4), 4, who())


def test_two_warps_race_until_a_barrier_lies_between():
    for first, second in (("store", "load"), ("load", "store"), ("store", "store")):
        for epoch, races in ((0, True), (1, False)):
            memory = buffer()
            _access(memory, first, value(1), who(0))
            if races:
                with pytest.raises(Fault, match=f"race: {second} of byte 0 of x .* another warp, with no barrier"):
                    _access(memory, second, value(2), who(1, epoch=epoch))
            else:
                _access(memory, second, value(2), who(1, epoch=epoch))


def test_a_warp_does_not_race_with_itself_and_readers_not_with_each_other():
    memory = buffer()
    memory.load(at(0, 0), 4, who(0, 1))
    memory.load(at(0), 4, who(2))
    with pytest.raises(Fault, match="race"):
        memory.store(at(0), value(), who(1))
    memory.store(at(4), value(), who(3))
    memory.load(at(4), 4, who(3))
    memory.store(at(4), value(8), who(3))


def test_blocks_race_whatever_barriers_they_passed():
    for first, second in (("store", "load"), ("load", "store"), ("store", "store")):
        memory = buffer()
        _access(memory, first, value(1), who(0, block=0))
        with pytest.raises(Fault, match=r"race: .* by another block"):
            _access(memory, second, value(2), who(0, block=1, epoch=5))


def test_a_block_that_read_what_others_read_may_not_write_it():
    memory = buffer()
    memory.load(at(0), 4, who(0, block=0))
    memory.load(at(0), 4, who(0, block=1))
    with pytest.raises(Fault, match="another block"):
        memory.store(at(0), value(), who(0, block=1, epoch=3))


def test_writing_the_same_value_twice_is_let_through():
    memory = buffer()
    memory.store(at(0, 0), value(3, 3), who(0, 1))
    memory.store(at(0), value(3), who(2))
    with pytest.raises(Fault, match="two threads write different values"):
        buffer().store(at(0, 0), value(3, 4), who(0, 0))


def test_a_copy_in_flight_is_not_read_before_it_was_waited_for():
    memory = buffer()
    memory.store(at(0), value(), who(0), in_flight=True)
    with pytest.raises(Fault, match="whose copy was not waited for"):
        memory.load(at(0), 4, who(0))
    memory.arrived(at(0), 4, who(0))
    memory.load(at(0), 4, who(0))
    with pytest.raises(Fault, match="race"):  # the others also need a barrier
        memory.load(at(0), 4, who(1))
    memory.load(at(0), 4, who(1, epoch=1))


def test_traffic_counts_sectors_of_each_warp():
    memory = buffer()
    memory.load(at(*range(0, 128, 4)), 4, who(*[0] * 32))  # neighbours: four sectors
    assert (memory.loads.bytes, memory.loads.sectors, memory.loads.widths) == (128, 4, {32: 1})
    memory.load(
        at(0, 64, 0),
        4,
        who(0, 0, 1),
    )  # far apart, and another warp: three more
    assert (memory.loads.sectors, memory.stores.sectors) == (7, 0)


def test_an_address_in_no_buffer_names_the_one_before_it():
    memory = GlobalMemory([buffer(), Memory(np.zeros(8, np.uint8), "y", defined=True, base=2 * BASE)])
    with pytest.raises(Fault, match="load of 4 bytes at an address in no buffer, 12 bytes behind the end of x"):
        memory.load(at(268), 4, who())
    memory.store(np.array([2 * BASE, BASE]), value(1, 2), who(0, 0))
    assert [each.content[0] for each in memory.buffers] == [2, 1]


def _access(memory: Memory, kind: str, values: np.ndarray, by: Who) -> None:
    if kind == "load":
        memory.load(at(0), 4, by)
    else:
        memory.store(at(0), values, by)
