"""Quantisers know no tensor names: what they refuse gets its name here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quant.errors import SchemeError


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the tensor's name before the sentence of a SchemeError raised inside."""
    try:
        yield
    except SchemeError as error:
        raise SchemeError(f"{name}: {error}") from error
