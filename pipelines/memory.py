"""Memory of a whole process: settings made before heavy work, and the largest size that it had."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

# Parameters of mallopt in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def give_back_freed_memory() -> None:
    """Hand back to the system what is free now, so that the next stage's peak is its own. Nothing happens without glibc."""
    if sys.platform.startswith("linux") and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def restart_peak() -> None:
    """Count the largest resident size from now on, where the kernel lets a process do so."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Largest resident size of this process since ``restart_peak``, or since it began."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kibibytes on Linux, bytes on macOS
        return peak if sys.platform == "darwin" else peak * 1024


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
