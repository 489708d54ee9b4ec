"""Check an artefact against its manifest, byte for byte, and name the first broken thing.

Exit code 0: everything holds. 1: something does not, or ``--against`` found a difference. 2: there is nothing to check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.recheck import recheck_measurements
from formats.differences import Difference, diff
from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.progress import Progress
from quant.errors import UsageError, VerifyError

SHOWN_DIFFERENCES = 40
_MEGABYTE = 1_000_000

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an artefact, with its manifest.json.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MANIFEST", help="Also compare with this manifest (or the one in this folder); run times are ignored."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Recompute sizes, hashes, headers, sums, configuration, round trips and perplexities; name the first broken thing."""
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder} (give the folder that holds manifest.json)")
    if against is not None and not against.exists():
        raise UsageError(f"no such manifest to compare with: {against}")
    seen: list[tuple[str, str]] = []
    try:
        manifest = _verify(folder, seen)
    except Broken as broken:
        _show(folder, seen, broken, None, as_json)
        raise
    differences = None if against is None else diff(manifest, Manifest.load(against))
    _show(folder, seen, None, differences, as_json)
    if differences:
        raise VerifyError(f"{folder} and {against} differ in {len(differences)} places")


def _verify(folder: Path, seen: list[tuple[str, str]]) -> Manifest:
    with Progress().stage("verify", unit="MB") as report:
        manifest = verify_folder(
            folder,
            report=lambda check, what: seen.append((check, what)),
            progress=lambda done, total: report(done // _MEGABYTE, total // _MEGABYTE),
        )
    again = recheck_measurements(folder, manifest)
    if again is not None:
        seen.append(("measurements", again))
    return manifest


def _show(
    folder: Path,
    seen: list[tuple[str, str]],
    broken: Broken | None,
    differences: tuple[Difference, ...] | None,
    as_json: bool,
) -> None:
    if as_json:
        found: dict[str, Any] = {
            "folder": str(folder),
            "verified": broken is None,
            "checks": [{"check": check, "seen": what} for check, what in seen],
            "broken": broken.record() if broken else None,
        }
        if differences is not None:
            found["differences"] = [{"where": d.where, "left": d.left, "right": d.right} for d in differences]
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for check, what in seen:
        typer.echo(f"ok      {check:<9} {what}")
    if broken is not None:  # its sentence goes to standard error, as every error's does
        return
    typer.echo(f"{folder} is what its manifest says")
    if differences is not None:
        for difference in differences[:SHOWN_DIFFERENCES]:
            typer.echo(f"differs  {difference}")
        if len(differences) > SHOWN_DIFFERENCES:
            typer.echo(f"and {len(differences) - SHOWN_DIFFERENCES} more (--json lists all)")
        if not differences:
            typer.echo("no difference but the run itself")


if __name__ == "__main__":
    run_app(app)
