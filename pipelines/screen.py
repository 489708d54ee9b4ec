"""Standard output as tables are printed on it."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """A terminal as wide as it is; in a pipe wide enough that no table is folded."""
    found = Console()
    return found if found.is_terminal else Console(width=200)
