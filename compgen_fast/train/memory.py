"""Memory that a process has once got, it keeps.

glibc hands large blocks back to the system when they are freed. A training step frees what the next step asks for
again, so each step has its pages taken away and given back, cleared: a quarter of a step of `frame_vae_cpu`.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, from malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more on 64-bit machines


def keep_freed_memory() -> None:
    """From now on freed blocks of up to 32 MiB stay with the process, 1 GiB of them at most. Elsewhere than on glibc
    nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
