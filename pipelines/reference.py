"""What an artefact is compared with: by default the very source it was made from, else a model or another artefact by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from formats.manifest import NAME, Manifest
from formats.sources import resolve
from formats.writer import hash_file
from pipelines.progress import announce
from quant.errors import UsageError


@dataclass(frozen=True, slots=True)
class Reference:
    """A folder with a model, what to call it, and its weight files' SHA-256."""

    folder: Path
    name: str
    weights: dict[str, str]


def find_reference(manifest: Manifest, against: str | None) -> Reference:
    """The reference's folder and hashes.

    Args:
        against: a model as ``run --model`` takes it, or the folder of another artefact; None: the manifest's own source.

    Raises:
        UsageError: the source's files are no longer those that the artefact was made from.
        SourceError: there is no such model.
    """
    if against is not None and (Path(against) / NAME).is_file():
        other = Manifest.load(Path(against))
        return Reference(Path(against), against, other.weights())
    name = against or manifest.source.requested
    source = resolve(name, report=announce)
    weights = {path.name: hash_file(path)[1] for path in sorted(source.folder.glob("*.safetensors"))}
    if not weights:
        raise UsageError(f"{name} holds no .safetensors files to compare with: give another --against")
    if against is None:
        _check_unchanged(manifest, weights)
    return Reference(source.folder, name, weights)


def _check_unchanged(manifest: Manifest, weights: dict[str, str]) -> None:
    recorded = {file.name: file.sha256 for file in manifest.source.files if file.name.endswith(".safetensors")}
    changed = sorted(name for name in {*recorded, *weights} if recorded.get(name) != weights.get(name))
    if changed:
        raise UsageError(
            f"{manifest.source.requested} is no longer what the artefact was made from ({', '.join(changed[:4])} differ): give "
            "the right one with --against"
        )
