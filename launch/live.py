"""What a run shows while it lives: a table that is redrawn on a terminal, plain lines everywhere else."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.progress import progress_line, show_cache
from protocol.units import show_bytes, show_seconds

# First status after this long, then again as often: nobody should wonder whether it hangs.
PLAIN_EVERY_S = 10.0
# During set-up, whose parts speak for themselves, a line comes after so long without one.
QUIET_S = 20.0
RING_CELLS = 24


class Screen:
    """`say` prints a line that stays; `show` shows a coordinator snapshot (launch/tally.py)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        # A reader that went away (`| head`, a closed terminal) must not end the run that it watched.
        self._console.on_broken_pipe = self._forget_reader  # type: ignore[method-assign]
        self._reader_gone = False
        self._live: Live | None = None
        self._stall: str | None = None
        self._advised: tuple[str | None, int] | None = None
        self._spoke_s = time.monotonic()
        self._shown_s = -math.inf  # the first snapshot is worth a line at once

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def say(self, line: str) -> None:
        self._attempt(lambda: self._print(line))

    def show(self, state: dict[str, Any]) -> None:
        self._attempt(lambda: self._show(state))

    def still(self, doing: str, since_s: float) -> None:
        """Says what was said last once more, with the time since `since_s`, when QUIET_S have gone by without a line.
        Both times are monotonic."""
        now = time.monotonic()
        if now - self._spoke_s >= QUIET_S:
            self.say(f"still at it after {show_seconds(now - since_s)}: {doing}")

    def settle(self) -> None:
        """Takes the table away: what is said from here on is the last word."""
        live, self._live = self._live, None
        self._attempt(lambda: live.stop() if live is not None else None)

    def _attempt(self, write: Callable[[], None]) -> None:
        if not self._reader_gone:
            try:
                write()
            except OSError:
                self._forget_reader()

    def _forget_reader(self) -> None:
        self._reader_gone = True
        if self._console.file is sys.stdout:
            # What is still buffered would fail again when the interpreter flushes it at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def _print(self, line: str) -> None:
        self._spoke_s = time.monotonic()
        self._console.print(line, markup=False, highlight=False)
        self._console.file.flush()

    def _show(self, state: dict[str, Any]) -> None:
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(view(state), refresh=True)
            return
        if state["stall"] not in (None, self._stall):
            self._print(state["stall"])
        self._stall = state["stall"]
        if (advice := state["advice"]) is not None:
            # Once, and again when it would be another split.
            if (key := (advice["short"], advice["best"]["producers"])) != self._advised:
                self._print(f"split: {advice['text']}")
            self._advised = key
        if time.monotonic() - self._shown_s >= PLAIN_EVERY_S:
            self._shown_s = time.monotonic()
            self._print(progress_line(state))


def view(state: dict[str, Any]) -> Table:
    """The table of one snapshot."""
    rows: list[tuple[str, str]] = []
    eta = show_seconds(state["eta_s"]) if state["eta_s"] is not None else "not known yet"
    rows.append(("step", f"{state['step']} of {state['steps']}, {eta} left"))
    rows.append(("producers", _side(state, "producer")))
    if state["remote_producers"]:
        rows.append(("on other hosts", ", ".join(state["remote_producers"])))
    rows.append(("consumers", _side(state, "consumer")))
    rows.append(("ring", _ring(state["ring"], state["ring_slots"])))
    if state["advice"] is not None:
        rows.append(("split", state["advice"]["text"]))
    if state["loss"] is not None:
        rows.append(("loss", f"{state['loss']:.3f}"))
        rows.append(("accuracy by slot", _shares(state["accuracy"])))
    if state["acceptance"] is not None:
        rows.append(("acceptance length", f"{state['acceptance']:.3f}"))
        rows.append(("k drafts accepted", _shares(state["acceptance_per_position"])))
    if state["cache"] is not None:
        rows.append(("cache", show_cache(state["cache"])))
    rows.append(("streamed", show_bytes(state["bytes_streamed"])))
    if state["waiting"] is not None:
        rows.append(("waiting", f"for {state['waiting']}"))
    troubles = [
        f"{state[what]} {what}"
        for what in ("restarts", "quarantined", "skipped", "numerics_changed", "checkpoints_failed")
        if state[what]
    ]
    if troubles:
        rows.append(("troubles", ", ".join(troubles)))
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, Text(value))  # a bar in square brackets is no markup
    return table


def _side(state: dict[str, Any], side: str) -> str:
    done = {"producer": "produced", "consumer": "trained"}[side]
    mfu = state[f"{side}_mfu"]
    return (
        f"{state[f'{side}_tokens_per_s']:,.0f} tokens/s, "
        + (f"MFU {mfu:.0%}, " if mfu is not None else "")
        + f"waiting {state[f'{side}_wait_share']:.0%}, {state[f'blocks_{done}']:,} blocks {done}"
    )


def _ring(counts: dict[str, int], slots: int) -> str:
    """A bar: # holds a block that waits for its consumer, + is being filled, . is empty."""
    ready, filling = counts["ready"] + counts["delivered"], counts["leased"]
    cells = min(slots, RING_CELLS)
    full, half = round(cells * ready / slots), round(cells * filling / slots)
    bar = ("#" * full + "+" * half).ljust(cells, ".")[:cells]
    return f"[{bar}] {ready} ready, {filling} being filled, {slots} slots"


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)
