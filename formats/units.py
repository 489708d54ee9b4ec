"""Sizes as people read them: decimal and binary units beside each other, both labelled."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """``0.170 GB (0.158 GiB)``, or MB and MiB below 100 MB."""
    if nbytes >= 10**8:
        return f"{nbytes / 1e9:.3f} GB ({nbytes / 2**30:.3f} GiB)"
    return f"{nbytes / 1e6:.3f} MB ({nbytes / 2**20:.3f} MiB)"
