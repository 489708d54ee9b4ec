"""The edge: every expected failure is one line and an exit code, and help costs no heavy import."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from pipelines.cli import find_commands, run_app
from quant.errors import OutputError, VerifyError

ROOT = Path(__file__).resolve().parents[1]


def outcome(app: typer.Typer, *args: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_app(app, args, "tool")
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def command(failure: BaseException | None = None) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def main(
        name: Annotated[str, typer.Argument()],
        bits: Annotated[int, typer.Option(min=2, max=8)] = 4,
    ) -> None:
        if failure is not None:
            raise failure
        print(f"{name} at {bits} bits")

    return app


def test_a_command_that_works_leaves_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(command(), "rtn", "--bits", "3") == 0
    assert capsys.readouterr() == ("rtn at 3 bits\n", "")


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (OutputError("x is not empty; --force replaces it"), 2, "error: x is not empty; --force replaces it\n"),
        (VerifyError("model.safetensors: SHA-256 differs"), 1, "error: model.safetensors: SHA-256 differs\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (typer.Exit(7), 7, ""),
        (typer.Abort(), 1, "error: stopped, as answered\n"),
    ],
)
def test_expected_failures_are_one_line(failure: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(command(failure), "rtn") == code
    assert capsys.readouterr() == ("", line)


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_app(command(ZeroDivisionError()), ["rtn"], "tool")


@pytest.mark.parametrize(
    ("args", "names"),
    [(["rtn", "--bits", "9"], "--bits"), (["rtn", "--bit", "4"], "--bit"), (["rtn", "--bits", "four"], "--bits"), ([], "name")],
)
def test_wrong_usage_is_one_line_and_two(args: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(command(), *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert names in err


def test_commands_are_found_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text('"""Plan it.\n\nMore."""\nraise SystemExit("imported")\napp = 1\n')
    (tmp_path / "two_words.py").write_text('"""Two."""\napp: object = 1\n')
    (tmp_path / "helper.py").write_text('"""No command."""\ndef f():\n    app = 1\n')
    assert find_commands(tmp_path) == {"plan": "Plan it.", "two-words": "Two."}


def bitledger(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pipelines", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_a_wrong_one_is_named() -> None:
    shown = bitledger("--help")
    assert shown.returncode == 0
    for name, line in find_commands().items():
        assert f"{name} {' '.join(line.split()[:3])}" in " ".join(shown.stdout.split())
    assert bitledger().stdout == shown.stdout
    wrong = bitledger("rnu", "--bits", "4")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: No such command 'rnu'")
    assert wrong.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [(), *((name,) for name in find_commands())], ids=" ".join)
def test_help_answers_within_a_second(words: tuple[str, ...]) -> None:
    """Seconds of the processor, the best of three: the machine may be busy with other things."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert bitledger(*words, "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < 1.0, seconds


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        # A shell that starts this in the background makes its children ignore the signal: the sleeper listens again.
        "import signal, time, typer\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pipelines.cli import run_app\napp = typer.Typer()\n\n@app.command()\n"
        "def main() -> None:\n    print('ready', flush=True)\n    time.sleep(60)\n\nrun_app(app)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "sleeper.py"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    try:
        assert process.communicate(timeout=30)[1] == "error: interrupted\n"
    finally:
        process.kill()
    assert process.returncode == 130
