"""The command line: ``bitledger NAME ...`` equals ``python -m pipelines.NAME ...``, and where all commands meet their errors.

A command is a module of this package with ``def main(...)`` and ``app = typer.Typer(...)`` of that one function; its docstring's
first line is what ``bitledger --help`` shows. Commands are found by scanning the folder and parsing, not importing, the
modules: only the command that is called is imported, so that help and bad names answer at once.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pipelines.memory import keep_freed_memory
from quant.errors import BitledgerError

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
INTERRUPTED = 130  # what shells give for a process ended by Ctrl-C


def find_commands(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Name -> one line of help of every command module in ``folder``: those that define ``app`` at top level."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {name for node in tree.body for name in _assigned(node)}
        if "app" in names and not path.stem.startswith("_"):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or path.stem).splitlines()[0]
    return found


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def run_app(app: typer.Typer, args: Sequence[str] | None = None, prog: str | None = None) -> NoReturn:
    """Run ``app`` and leave the process; nothing that a user can mend shows a traceback.

    A BitledgerError becomes ``error: <its sentence>`` on standard error and its own exit code, a wrong option or argument one
    line and exit code 2, Ctrl-C one line and 130. Anything else is a defect of ours and keeps its traceback.
    """
    keep_freed_memory()
    sys.exit(_run(get_command(app).main, args, prog))


def _run(main: Callable[..., object], args: Sequence[str] | None, prog: str | None) -> int:
    try:
        result = main(args=args, prog_name=prog, standalone_mode=False)
        sys.stdout.flush()
    except BitledgerError as error:
        return _complain(str(error), error.exit_code)
    except typer.TyperException as error:
        return _complain(f"{error.format_message().rstrip('.')} (--help says more)", 2)
    except typer.Abort:
        return _complain("stopped, as answered", 1)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader, for example head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if result == INTERRUPTED:  # typer turns Ctrl-C into this exit code and says nothing
        return _complain("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _complain(sentence: str, code: int) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"bitledger {metadata.version('bitledger')}")
        except metadata.PackageNotFoundError:
            typer.echo("bitledger, run from a folder without being installed (make sets it up)")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Quantise a language model and account for every bit: packed, hashed, evaluated, with what it means on each card."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _group(chosen: str | None) -> TyperGroup:
    """The root command; ``chosen`` is imported for real, the others are only there to be listed."""
    root = typer.Typer(name="bitledger", add_completion=False, invoke_without_command=True, context_settings=HELP_OPTIONS)
    root.callback()(_root)
    group = get_command(root)
    assert isinstance(group, TyperGroup)
    for name, line in find_commands().items():
        if name == chosen:
            app = importlib.import_module(f"pipelines.{name.replace('-', '_')}").app
        else:
            app = typer.Typer()
            app.command(name, help=line)(lambda: None)
        group.add_command(get_command(app), name)
    return group


def main() -> NoReturn:
    """Entry point of ``bitledger`` and of ``python -m pipelines``."""
    commands = find_commands()
    chosen = next((word for word in sys.argv[1:] if word in commands), None)
    # The group is made inside _run: importing a command can be interrupted, too.
    sys.exit(_run(lambda **options: _group(chosen).main(**options), None, "bitledger"))
