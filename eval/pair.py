"""The two models of an evaluation: the artefact read back from its packed files, and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calib.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models in memory, in evaluation mode, with the same tokenizer.

    Attributes:
        artefact: the model under test, called as ``model(ids, use_cache=False).logits``.
        reference: the float model, or another artefact's, called alike.
        tokenizer: of the artefact's folder.
        folder: of the artefact: tokenizer and generation files for what needs them in transformers' form.
        subject: weight file to SHA-256 of the artefact (with the cache's scales where a quantised cache is in the loop).
        baseline: weight file to SHA-256 of the reference.
        reference_name: what to call the reference in sentences and settings.
        seed: of every bootstrap and every choice of items.
        batch: windows or requests that go through a model at a time.
    """

    artefact: Any
    reference: Any
    tokenizer: TextTokenizer
    folder: Path
    subject: Mapping[str, str]
    baseline: Mapping[str, str]
    reference_name: str
    seed: int = 0
    batch: int = 4

    def inputs(self) -> dict[str, str]:
        """Digests of the reference, for the inputs of a paired measurement."""
        return {f"baseline {file}": digest for file, digest in self.baseline.items()}
