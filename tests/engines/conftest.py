"""Artefacts of the embedded model, made by the command that a user types, once per test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_artefacts import quantise

Artefact = Callable[[str, str], Path]
TOKENS = 256


def prompt_ids(folder: Path) -> list[int]:
    """The first 256 tokens of a natural text, by the tokenizer in ``folder``."""
    from calib.corpora import load_corpus
    from calib.tokenizer import TextTokenizer

    ids: list[int] = TextTokenizer.from_folder(folder).encode(load_corpus("pydoc").text[:20_000])[:TOKENS].tolist()
    assert len(ids) == TOKENS
    return ids


@pytest.fixture(scope="session")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """``artefact(method, way)`` -> folder of the embedded model at 4 bits, groups of 64.

    ``way`` is ``--symmetric``, ``--full-range``, ``--zero-point``; ``head``: the tied output head at 4 bits too, the embedding
    in float; or ``token`` or ``static``: 8 bits, and the inputs rounded so.
    """
    made: dict[tuple[str, str], Path] = {}

    def make(method: str, zero: str) -> Path:
        if (method, zero) not in made:
            folder = tmp_path_factory.mktemp("artefacts") / f"{method}{zero}"
            small = ("--corpus", "pydoc", "--window", "128", "--calibration-windows", "8", "--evaluation-windows", "2")
            scheme: tuple[str, ...] = ("--bits", "4", "--group-size", "64", zero)
            if zero == "head":
                recipe = folder.with_suffix(".toml")
                recipe.write_text('[[rule]]\nmatch = "lm_head"\n[[rule]]\nmatch = "*"\n')
                scheme = ("--recipe", str(recipe))
            if zero in ("token", "static"):
                scheme = ("--bits", "8", "--group-size", "channel", "--activations", zero)
            made[method, zero] = quantise(folder, method, *scheme, *small)
        return made[method, zero]

    return make
