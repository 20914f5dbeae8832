"""Memory that notices what a GPU would not tell: accesses beyond a buffer, at a wrong address, of bytes nobody wrote,
and races.

A race is two accesses of one byte, one of them a write, whose order nothing decides:

    within a block     by two warps with no barrier between them; the warps of a lock-step emulation hide such a race
    between blocks     in any case: blocks run in whatever order the device likes

Two writes of the same value are let through: compilers let several threads that hold the same number all store it.
Accesses of one warp are taken to be ordered.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
SECTOR = 32  # bytes that a GPU's memory moves at a time
NOBODY, SEVERAL = -1, -2
WARP_SHIFT = np.int64(58)  # addresses have fewer bits, sectors fewer still


class Fault(Exception):
    """The kernel did something that a GPU would not allow, or whose outcome it does not define."""


@dataclass(frozen=True)
class Who:
    """Who makes an access: the block, how many barriers it has passed, and the warp of each thread [n]."""

    block: int
    epoch: int
    warps: Index


@dataclass
class Traffic:
    """What loads or stores asked for: bytes, sectors of each warp's instruction, and instructions by width."""

    bytes: int = 0
    sectors: int = 0
    widths: dict[int, int] = field(default_factory=dict)
    touched: dict[int, list[Index]] = field(default_factory=dict)  # by block, the sectors of each instruction

    def note(self, addresses: Index, size: int, who: Who) -> None:
        self.bytes += size * len(addresses)
        self.widths[8 * size] = self.widths.get(8 * size, 0) + 1
        sectors = np.concatenate([addresses // SECTOR, (addresses + size - 1) // SECTOR])
        self.sectors += len(np.unique(np.tile(who.warps, 2) << WARP_SHIFT | sectors))
        self.touched.setdefault(who.block, []).append(np.unique(sectors))

    def moved(self) -> int:
        """Bytes of the distinct sectors that each block touches, over all blocks: what passes between the blocks'
        first-level caches and the rest of the memory, when a block's second access to a sector finds it there.
        """
        return SECTOR * sum(len(np.unique(np.concatenate(sectors))) for sectors in self.touched.values())


class Memory:
    """Some bytes with what is known of each.

    Args:
        content: uint8 [n], read and written in place.
        name: of the buffer, for faults.
        defined: whether its bytes may be read before they are written.
        base: the address of the first byte.
    """

    def __init__(self, content: Bytes, name: str, *, defined: bool, base: int = 0) -> None:
        self.content, self.name, self.base = content, name, base
        self.defined = np.full(len(content), defined)
        self.in_flight = np.zeros(len(content), bool)  # copied by cp.async, and nobody has waited for it
        self.writer = np.full((3, len(content)), NOBODY)  # block, epoch and warp of the last write
        self.reader = np.full((3, len(content)), NOBODY)  # of the last read; SEVERAL warps may have read
        self.loads, self.stores = Traffic(), Traffic()

    def load(self, addresses: Index, size: int, who: Who) -> Bytes:
        """``size`` bytes [n, size] at each address."""
        at = self._at(addresses, size, "load")
        self.loads.note(addresses, size, who)
        if not self.defined[at].all():
            raise Fault(f"load of {self._named(at[~self.defined[at].all(1)][0, 0])}, which nobody has written")
        if self.in_flight[at].any():
            raise Fault(f"load of {self._named(at[self.in_flight[at]][0])}, whose copy was not waited for")
        self._check("load", at, self.writer, who)
        self._remember(self.reader, at, who)
        return self.content[at]

    def store(self, addresses: Index, values: Bytes, who: Who, *, in_flight: bool = False) -> None:
        """Writes values [n, size]."""
        at = self._at(addresses, values.shape[1], "store")
        self.stores.note(addresses, values.shape[1], who)
        other = self.content[at] != values
        self._check("store", at, self.writer, who, ~other & self.defined[at])
        self._check("store", at, self.reader, who, ~other & self.defined[at])
        self.content[at] = values
        if (self.content[at] != values).any():
            raise Fault(f"store: two threads write different values to {self._named(at[0, 0])} at once")
        self.defined[at], self.in_flight[at] = True, in_flight
        self._remember(self.writer, at, who)

    def arrived(self, addresses: Index, size: int, who: Who) -> None:
        """A copy to these addresses was waited for: only now it counts as written."""
        at = self._at(addresses, size, "copy")
        self.in_flight[at] = False
        self._remember(self.writer, at, who)

    def holds(self, addresses: Index) -> NDArray[np.bool_]:
        return (addresses >= self.base) & (addresses < self.base + len(self.content))

    def _at(self, addresses: Index, size: int, what: str) -> Index:
        """The bytes [n, size] of each access among the content."""
        at = (addresses - self.base)[:, None] + np.arange(size)
        if (at < 0).any() or (at >= len(self.content)).any():
            first = int(at[((at < 0) | (at >= len(self.content))).any(1)][0, 0])
            raise Fault(f"{what} of {size} bytes at byte {first} of {self.name}, which has {len(self.content)}")
        if (addresses % size).any():
            first = int(at[addresses % size != 0][0, 0])
            raise Fault(
                f"{what} of {size} bytes at byte {first} of {self.name}: the address is not a multiple of {size}"
            )
        return at

    def _check(self, what: str, at: Index, last: Index, who: Who, harmless: NDArray[np.bool_] | None = None) -> None:
        """Refuses an access that races with the last one of the other kind."""
        block, epoch, warp = last[0][at], last[1][at], last[2][at]
        elsewhere = (block != NOBODY) & (block != who.block)
        beside = (block == who.block) & (epoch == who.epoch) & (warp != who.warps[:, None])
        racing = elsewhere | beside
        if harmless is not None:
            racing &= ~harmless
        if racing.any():
            kind = "write" if last is self.writer else "read"
            other = "another block" if elsewhere[racing][0] else "another warp, with no barrier in between"
            raise Fault(f"race: {what} of {self._named(at[racing][0])} and a {kind} of it by {other}")

    def _remember(self, last: Index, at: Index, who: Who) -> None:
        warps = np.broadcast_to(who.warps[:, None], at.shape)
        if last is self.reader:
            now = (last[0][at] == who.block) & (last[1][at] == who.epoch)
            elsewhere = (last[0][at] != NOBODY) & (last[0][at] != who.block)
            warps = np.where(now & (last[2][at] != warps), SEVERAL, warps)
            last[2][at] = warps
            last[0][at] = np.where(elsewhere, SEVERAL, who.block)
        else:
            last[2][at] = warps
            last[0][at] = who.block
        last[1][at] = who.epoch

    def _named(self, at: np.int64) -> str:
        return f"byte {at} of {self.name}"


class TracedMemory(Memory):
    """Bytes of which only traffic is noted: at real sizes, watching each byte would take more memory than there is."""

    def __init__(self, content: Bytes, name: str, base: int) -> None:
        self.content, self.name, self.base = content, name, base
        self.loads, self.stores = Traffic(), Traffic()

    def load(self, addresses: Index, size: int, who: Who) -> Bytes:
        at = self._at(addresses, size, "load")
        self.loads.note(addresses, size, who)
        return self.content[at]

    def store(self, addresses: Index, values: Bytes, who: Who, *, in_flight: bool = False) -> None:
        at = self._at(addresses, values.shape[1], "store")
        self.stores.note(addresses, values.shape[1], who)
        self.content[at] = values

    def arrived(self, addresses: Index, size: int, who: Who) -> None:
        pass


class GlobalMemory:
    """All buffers that a kernel was given."""

    def __init__(self, buffers: list[Memory]) -> None:
        self.buffers = buffers

    def split(self, addresses: Index, what: str) -> list[tuple[Memory, Index]]:
        """The buffers that the addresses lie in, each with the places [m] of those addresses among them."""
        left = np.ones(len(addresses), bool)
        found = []
        for memory in self.buffers:
            inside = left & memory.holds(addresses)
            if inside.any():
                found.append((memory, inside.nonzero()[0]))
                left &= ~inside
        if left.any():
            address = int(addresses[left][0])
            below = [memory for memory in self.buffers if memory.base <= address]
            nearest = max(below, key=lambda memory: memory.base, default=None)
            behind = (
                ""
                if nearest is None
                else f", {address - nearest.base - len(nearest.content)} bytes behind the end of {nearest.name}"
            )
            raise Fault(f"{what} at an address in no buffer{behind}")
        return found

    def load(self, addresses: Index, size: int, who: Who) -> Bytes:
        values = np.empty((len(addresses), size), np.uint8)
        for memory, rows in self.split(addresses, f"load of {size} bytes"):
            values[rows] = memory.load(addresses[rows], size, Who(who.block, who.epoch, who.warps[rows]))
        return values

    def store(self, addresses: Index, values: Bytes, who: Who) -> None:
        for memory, rows in self.split(addresses, f"store of {values.shape[1]} bytes"):
            memory.store(addresses[rows], values[rows], Who(who.block, who.epoch, who.warps[rows]))
