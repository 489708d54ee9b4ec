"""Progress: one line per stage with block n/m, rate and time left, on a terminal and in a pipe alike.

On a terminal the line is live. Anywhere else a plain line is written when a stage starts, then at least every 30 seconds (also
when a single block takes longer than that: a helper thread watches the clock), and when it ends. Lines go to standard error, so
that standard output stays free for results. The seconds of every stage are kept for the manifest.

Lower packages never see this module: they are handed the callable ``(done, total) -> None`` that a stage yields.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live

Report = Callable[[int, int], None]

INTERVAL_S = 30.0


def announce(line: str) -> None:
    """Say one line on standard error, before something that takes long and has no stage of its own."""
    print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """``seconds`` as a person says them: ``4.2 s``, ``71 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plural(unit: str) -> str:
    """``blocks`` of ``block``; a symbol such as ``MB`` stays as it is."""
    return unit if unit.isupper() else unit + "s"


def speed(done: int, seconds: float, unit: str) -> str:
    """Units per second, or seconds per unit when that is the larger number; ``-`` before there is anything to say."""
    if done <= 0 or seconds <= 0:
        return "-"
    rate = done / seconds
    if rate < 1:
        return f"{seconds / done:.3g} s/{unit}"
    return f"{rate:,.0f} {plural(unit)}/s" if rate >= 1000 else f"{rate:.3g} {plural(unit)}/s"


@dataclass(slots=True)
class _Stage:
    """What is known of the running stage; ``total`` is None until somebody says it."""

    name: str
    unit: str
    total: int | None
    started: float
    said: float
    done: int = 0

    def counted(self) -> str:
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{count} {self.unit}" if self.unit.isupper() else f"{self.unit} {count}"

    def rest(self, now: float) -> str:
        """``block 12/30, 2.4 s/block, 43 s left``."""
        elapsed = now - self.started
        parts = [self.counted(), speed(self.done, elapsed, self.unit)]
        if self.total is not None and self.done > 0:
            parts.append(f"{duration(elapsed / self.done * max(self.total - self.done, 0))} left")
        else:
            parts.append(f"{duration(elapsed)} so far")
        return ", ".join(parts)

    def ending(self, now: float, finished: bool) -> str:
        elapsed = now - self.started
        if not finished:
            return f"stopped at {self.counted()} after {duration(elapsed)}"
        if self.done == 0:
            return f"done in {duration(elapsed)}"
        return f"{self.counted()} in {duration(elapsed)}, {speed(self.done, elapsed, self.unit)}"


class Progress:
    """Shows one stage at a time and keeps its seconds.

    Args:
        stream: where the lines go; standard error when None.
        clock: seconds that only ever grow.
        interval_s: the longest silence in a pipe, in seconds, above 0.
        live: a live line instead of plain ones; None asks the stream whether it is a terminal.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
        live: bool | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._interval_s = interval_s
        self._live = (self._stream.isatty() and os.environ.get("TERM") != "dumb") if live is None else live
        self._lock = threading.Lock()
        self._stage: _Stage | None = None
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage, in the order in which the stages began; a stage entered twice counts both."""
        return dict(self._seconds)

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "block") -> Iterator[Report]:
        """Show ``name`` until the block ends; yields ``(done, total) -> None``, to be called from one thread at a time.

        Args:
            name: what is being done, for example ``quantise``.
            total: how many units there will be, or None when nobody knows yet.
            unit: one unit in the singular (``block``), or its symbol (``MB``).

        Raises:
            RuntimeError: a stage inside a stage (its seconds would be counted twice).
        """
        if self._stage is not None:
            raise RuntimeError(f"stage {name!r} begins inside stage {self._stage.name!r}")
        now = self._clock()
        stage = self._stage = _Stage(name, unit, total, started=now, said=now)
        self._seconds.setdefault(name, 0.0)
        finished = False
        try:
            with self._display(stage):
                yield self._reporter(stage)
                finished = True
        finally:
            self._stage = None
            now = self._clock()
            self._seconds[name] += now - stage.started
            if not self._live:
                self._line(f"{name}: {stage.ending(now, finished)}")

    def _reporter(self, stage: _Stage) -> Report:
        def report(done: int, total: int) -> None:
            stage.done, stage.total = done, total
            if not self._live:
                self._say_if_due(stage, 1.0)

        return report

    def _display(self, stage: _Stage) -> AbstractContextManager[object]:
        if self._live:
            return self._live_line(stage)
        count = f"{stage.total} {plural(stage.unit)}" if stage.total is not None else "started"
        self._line(f"{stage.name}: {count}")
        return self._heartbeat(stage)

    @contextmanager
    def _heartbeat(self, stage: _Stage) -> Iterator[None]:
        """Speak from a thread when no report comes; looks ten times per interval, and a tenth early, to stay inside it."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(self._interval_s / 10):
                self._say_if_due(stage, 0.9)

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _say_if_due(self, stage: _Stage, share: float) -> None:
        with self._lock:
            now = self._clock()
            if now - stage.said >= share * self._interval_s:
                stage.said = now
                self._line(f"{stage.name}: {stage.rest(now)}")

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    @contextmanager
    def _live_line(self, stage: _Stage) -> Iterator[Live]:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        ending: list[str] = []

        def render() -> Text:
            tail = ending[0] if ending else stage.rest(self._clock())
            return Text.assemble((stage.name, "bold"), f": {tail}", no_wrap=True, overflow="ellipsis")

        finished = False
        console = Console(file=self._stream, force_terminal=True)
        # Standard output is for results: rich would otherwise print it through this console, that is on standard error.
        with Live(get_renderable=render, console=console, refresh_per_second=4, redirect_stdout=False) as live:
            try:
                yield live
                finished = True
            finally:
                ending.append(stage.ending(self._clock(), finished))
