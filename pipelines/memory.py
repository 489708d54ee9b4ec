"""Memory settings of a whole process, made before heavy work."""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let freed memory be used again instead of giving it back to the system; True where that could be set.

    Tensors of many megabytes come and go by the thousand. By default glibc maps each one anew, and the kernel fills it with zeros
    page by page, which can take longer than the arithmetic. Whoever has set MALLOC_* variables is left alone.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0)) and bool(library.mallopt(_TRIM_THRESHOLD, _LARGEST))
