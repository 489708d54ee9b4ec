"""Progress: what is written when, with a clock that the test turns, and once with the real one."""

from __future__ import annotations

import io
import re
import time

import pytest

from pipelines.progress import Progress, duration, speed


class Clock:
    """Seconds that only move when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def piped(interval_s: float = 30.0) -> tuple[Progress, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return Progress(stream, clock, interval_s), clock, stream


def test_a_piped_stage_says_start_middle_and_end() -> None:
    progress, clock, stream = piped()
    with progress.stage("quantise", 30) as report:
        for block in range(1, 31):
            clock.now += 4
            report(block, 30)
    assert stream.getvalue().splitlines() == [
        "quantise: 30 blocks",
        "quantise: block 8/30, 4 s/block, 88 s left",  # the first report at or after 30 s, and so on
        "quantise: block 16/30, 4 s/block, 56 s left",
        "quantise: block 24/30, 4 s/block, 24 s left",
        "quantise: block 30/30 in 2 min 00 s, 4 s/block",
    ]
    assert progress.seconds == {"quantise": 120.0}


def test_a_piped_stage_is_never_silent_for_an_interval_while_one_block_runs() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval_s=0.2)
    with progress.stage("perplexity", 8, "window"):
        time.sleep(0.7)  # one slow window: nobody reports
    lines = stream.getvalue().splitlines()
    assert lines[0] == "perplexity: 8 windows"
    assert re.fullmatch(r"perplexity: done in 0\.\d s", lines[-1])
    assert len(lines[1:-1]) >= 2
    assert {re.sub(r"0\.\d", "0.x", line) for line in lines[1:-1]} == {"perplexity: window 0/8, -, 0.x s so far"}


def test_a_failing_stage_says_where_it_stopped_and_keeps_its_seconds() -> None:
    progress, clock, stream = piped()

    def fail() -> None:
        with progress.stage("read", 10, "tensor") as report:
            clock.now += 5
            report(4, 10)
            raise ValueError("disk")

    with pytest.raises(ValueError, match="disk"):
        fail()
    assert stream.getvalue().splitlines()[-1] == "read: stopped at tensor 4/10 after 5.0 s"
    assert progress.seconds == {"read": 5.0}
    with progress.stage("read"):  # the display is free again, and the same stage adds up
        clock.now += 2
    assert progress.seconds == {"read": 7.0}


def test_stages_keep_their_order_and_do_not_nest() -> None:
    progress, clock, _ = piped()
    for name, seconds in (("read", 1.5), ("capture", 2.0), ("write", 0.5)):
        with progress.stage(name):
            clock.now += seconds
    assert list(progress.seconds.items()) == [("read", 1.5), ("capture", 2.0), ("write", 0.5)]
    inside = pytest.raises(RuntimeError, match="'inner' begins inside stage 'outer'")
    with progress.stage("outer"), inside, progress.stage("inner"):
        pass


def test_a_total_that_only_the_callee_knows_is_taken_over() -> None:
    progress, clock, stream = piped(interval_s=1.0)
    with progress.stage("hash", unit="file") as report:
        clock.now += 2
        report(3, 5)
    assert stream.getvalue().splitlines() == [
        "hash: started",
        "hash: file 3/5, 1.5 files/s, 1.3 s left",
        "hash: file 3/5 in 2.0 s, 1.5 files/s",
    ]


def test_a_unit_that_is_a_symbol_has_no_plural() -> None:
    progress, clock, stream = piped(interval_s=1.0)
    with progress.stage("check values", 600, "MB") as report:
        clock.now += 2
        report(450, 600)
    assert stream.getvalue().splitlines() == [
        "check values: 600 MB",
        "check values: 450/600 MB, 225 MB/s, 0.7 s left",
        "check values: 450/600 MB in 2.0 s, 225 MB/s",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_live_line_is_rewritten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    clock, stream = Clock(), Terminal()
    progress = Progress(stream, clock)
    with progress.stage("quantise", 3) as report:
        clock.now += 6
        report(2, 3)
        print("a result")  # standard output must not be drawn into the display
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "quantise: block 2/3 in 6.0 s, 3 s/block" in shown
    assert stream.getvalue().count("\n") == 1, "one line per stage"
    assert capsys.readouterr().out == "a result\n"
    assert progress.seconds == {"quantise": 6.0}


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(stream, Clock()).stage("read", 2, "shard"):
        pass
    assert stream.getvalue() == "read: 2 shards\nread: done in 0.0 s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min 00 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_said_plainly(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("done", "seconds", "text"),
    [(0, 3.0, "-"), (5, 0.0, "-"), (30, 10.0, "3 blocks/s"), (3, 12.0, "4 s/block"), (5390, 1.0, "5,390 blocks/s")],
)
def test_speed_prefers_the_number_above_one(done: int, seconds: float, text: str) -> None:
    assert speed(done, seconds, "block") == text
