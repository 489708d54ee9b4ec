"""Problems of separate checks, told at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quant.errors import BitledgerError, UsageError


class Problems:
    """Collects errors of separate checks; ``settle`` raises them as one."""

    def __init__(self) -> None:
        self.found: list[BitledgerError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        except BitledgerError as error:
            self.found.append(error)

    def settle(self) -> None:
        """Raise what was found: a single error as it is, several as one UsageError with a line each; equal ones count once."""
        found = list({str(error): error for error in self.found}.values())
        if len(found) == 1:
            raise found[0]
        if found:
            lines = "\n".join(f"  - {error}" for error in found)
            raise UsageError(f"{len(found)} problems, nothing was done:\n{lines}")
