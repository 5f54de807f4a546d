"""How the C library gives memory to feature maps on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
"""The numbers of M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX in glibc's malloc.h."""

_LARGEST_KEPT = 128 << 20
_MOST_KEPT = 256 << 20
_ARENAS = 2
"""Memory that one thread freed can be reused only by threads of the same arena. With two arenas instead of one for each
thread, explaining photos of 12 megapixels took 60 to 90 MiB less, in the same time."""


def reuse_large_blocks() -> None:
    """Let glibc keep the memory of feature maps for the next pass, instead of giving it back to the system each time.

    By default, glibc takes each block of 32 MiB or more from the system anew, and the system fills each page with
    zeros. In passes of several pictures, that takes longer than some convolutions. After this call, blocks of up to
    128 MiB are reused, and up to 256 MiB of free memory stay with the process. The setting holds for the whole process,
    so only programs of our own call this. Nothing happens with another C library, or where the environment has settings
    for malloc.
    """
    if not sys.platform.startswith("linux") or _user_decided():
        return
    with suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        mallopt(_ARENA_MAX, _ARENAS)


def _user_decided() -> bool:
    """Return whether the environment has settings for malloc, or names another allocator."""
    set_by_name = any(name.startswith("MALLOC_") for name in os.environ)
    return set_by_name or any("malloc" in os.environ.get(name, "") for name in ("GLIBC_TUNABLES", "LD_PRELOAD"))
