"""Judge an artefact by a policy: does every bound hold, on exactly the files on disk?

Exit code 0: every bound holds. 1: one does not, or the files are not those of the manifest. 2: nothing can be judged.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.gates import Bound, Other, judge
from eval.recheck import recheck_measurements
from formats.gates import BoundRecord, GateRecord, gate_subject, hashes_text
from formats.integrity import Broken, verify_bytes
from formats.manifest import NAME, Manifest
from pipelines.cli import HELP_OPTIONS, run_app
from pipelines.policy import Policy, find_policy, load_policy, policy_names
from pipelines.progress import Progress
from quant.errors import GateFailed, UsageError, VerifyError

if TYPE_CHECKING:
    from rich.table import Table

_MEGABYTE = 1_000_000

app = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an artefact, with its manifest.json.")],
    policy: Annotated[str, typer.Option(metavar="FILE", help=f"Policy: a .toml file, or one of {', '.join(policy_names())}.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge an artefact by a policy on exactly the bytes on disk, and write the verdict into its manifest."""
    chosen = load_policy(find_policy(policy))
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder} (give the folder that holds {NAME})")
    if not (folder / NAME).is_file():
        raise UsageError(f"{folder} holds no {NAME}: it is no finished artefact")
    others = [_other(bound, folder) for bound in chosen.bounds]
    try:
        manifest = _files(folder)
    except Broken as broken:
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "policy": chosen.name, "passed": False, "broken": broken.record()}))
        raise
    gate = _judged(chosen, manifest, folder, others)
    kept = [record for record in manifest.gates if record.policy != gate.policy]
    manifest.model_copy(update={"gates": [*kept, gate]}).save(folder)
    _show(folder, manifest, gate, as_json)
    if not gate.passed:
        failed = [_sentence(bound) for bound in gate.bounds if not bound.held]
        raise GateFailed(f"{folder} does not pass {gate.policy}: {'; '.join(failed)}")


def _other(bound: Bound, folder: Path) -> Other | None:
    """The manifest that a bound compares with. Raises UsageError."""
    if bound.against is None:
        return None
    try:
        found = Manifest.load(bound.against)
    except VerifyError as error:
        raise UsageError(f"the policy compares {bound.title} with {bound.against}: {error}") from None
    if bound.against.resolve() in (folder.resolve(), (folder / NAME).resolve()):
        raise UsageError(f"the policy compares {bound.title} with {bound.against}: that is the artefact itself")
    return Other(str(bound.against), found)


def _files(folder: Path) -> Manifest:
    """The manifest, after every byte and every figure that has rows was found to be as it says. Raises Broken."""
    with Progress().stage("hash", unit="MB") as report:
        manifest = verify_bytes(folder, progress=lambda done, total: report(done // _MEGABYTE, total // _MEGABYTE))
    recheck_measurements(folder, manifest)
    return manifest


def _judged(policy: Policy, manifest: Manifest, folder: Path, others: list[Other | None]) -> GateRecord:
    bounds = [judge(bound, manifest, folder, other) for bound, other in zip(policy.bounds, others, strict=True)]
    return GateRecord(
        policy=policy.name,
        policy_sha256=policy.sha256,
        passed=all(bound.held for bound in bounds),
        judged_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        subject=gate_subject(manifest),
        bounds=bounds,
    )


def _title(bound: BoundRecord) -> str:
    against = f", difference to {bound.against}" if bound.against else ""
    return f"{bound.name}{f' of part {bound.part}' if bound.part else ''}{against}"


def _judged_text(bound: BoundRecord) -> str:
    return "value" if bound.judged == "value" else f"{bound.judged} end of the interval"


def _interval(bound: BoundRecord) -> str:
    if bound.low is None or bound.high is None or bound.level is None:
        return "-"
    return f"{bound.low:.6g} to {bound.high:.6g} ({bound.level:.0%}, n = {bound.n})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _sentence(bound: BoundRecord) -> str:
    """Figure, bound and interval of a bound that does not hold, and why."""
    figure = "" if bound.figure is None else f" {_judged_text(bound)} {_number(bound.figure)}"
    interval = f", value {_number(bound.value)}, interval {_interval(bound)}" if bound.value is not None else ""
    reason = f": {bound.reason}" if bound.reason else ""
    return f"{_title(bound)}{figure} (bound: {bound.limit}{interval}){reason}"


def _table(folder: Path, gate: GateRecord) -> Table:
    from rich.table import Table

    table = Table(title=f"{folder} by policy {gate.policy}", title_justify="left")
    for name in ("measurement", "unit", "value", "interval", "judged", "figure", "bound", "holds"):
        table.add_column(name, overflow="fold")
    for bound in gate.bounds:
        row = [_title(bound), bound.unit or "-", _number(bound.value), _interval(bound), _judged_text(bound)]
        table.add_row(*row, _number(bound.figure), bound.limit, "yes" if bound.held else "no")
    return table


def _show(folder: Path, manifest: Manifest, gate: GateRecord, as_json: bool) -> None:
    if as_json:
        found: dict[str, Any] = {"folder": str(folder), "weights": manifest.weights(), **gate.model_dump(mode="json")}
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    from pipelines.screen import console

    out = console()
    out.print(_table(folder, gate), markup=False)
    for bound in gate.bounds:
        if bound.reason:
            out.print(f"{_title(bound)} {bound.reason}", markup=False, highlight=False, soft_wrap=True)
    verdict = "passed" if gate.passed else "failed"
    text = f"{gate.policy} {verdict} on {hashes_text(manifest.weights())}; the verdict is in {folder / NAME}"
    out.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_app(app)
