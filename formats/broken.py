"""The first thing of an artefact that does not hold, and how errors of the packages become one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quant.errors import BitledgerError, VerifyError


class Broken(VerifyError):
    """The first thing that does not hold: which check, in which file and tensor, what was expected and what was found."""

    def __init__(
        self, check: str, text: str, *, file: str = "", tensor: str = "", expected: Any = None, actual: Any = None
    ) -> None:
        self.check, self.file, self.tensor, self.text = check, file, tensor, text
        self.expected = None if expected is None and actual is None else str(expected)
        self.actual = None if expected is None and actual is None else str(actual)
        where = ", ".join(part for part in (file, f"tensor {tensor}" if tensor else "") if part)
        values = "" if self.expected is None else f": expected {self.expected}, found {self.actual}"
        super().__init__(f"{check}: {where}{': ' if where else ''}{text}{values}")

    def record(self) -> dict[str, str | None]:
        """The same as JSON."""
        place = {"check": self.check, "file": self.file or None, "tensor": self.tensor or None}
        return {**place, "text": self.text, "expected": self.expected, "actual": self.actual}


@contextmanager
def named(check: str, file: str = "", tensor: str = "") -> Iterator[None]:
    """Errors of the packages become the first broken thing of ``check``."""
    try:
        yield
    except Broken:
        raise
    except BitledgerError as error:
        raise Broken(check, str(error), file=file, tensor=tensor) from error
    except OSError as error:
        raise Broken(check, f"cannot be read ({error.strerror or error})", file=file, tensor=tensor) from error
