"""Child processes: started by argument list, named, logged to a file each, ended by recorded pid.

A child is its own process group, so that Ctrl-C reaches only the launcher, and holds nothing of the launcher's but
the descriptors it is given.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.child import ERROR_PREFIX, LAUNCHER_VARIABLE

TAIL_BYTES = 4000


class Child:
    """One running child: `python -P -m MODULE ARGS`, output appended to `log_path`."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log_path: Path,
        environment: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        echo: bool = False,
    ) -> None:
        self.name, self.log_path = name, log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        output = None if echo else log_path.open("ab")
        self._log_start_bytes = output.tell() if output else 0
        # -P keeps the working folder off the module path: a file named launch.py there must not be run.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env=os.environ
            | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", LAUNCHER_VARIABLE: str(os.getpid())}
            | (environment or {}),
            pass_fds=pass_fds,
            process_group=0,
        )
        if output:
            output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for death by a signal. A code means that it has been reaped."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def end(self, grace_s: float) -> None:
        """TERM, `grace_s` of patience, then KILL; returns once it is reaped."""
        if self.exit_code() is None:
            self._process.terminate()
        if self.wait(grace_s) is None:
            self._process.kill()
            self._process.wait()

    def obituary(self) -> str:
        """One line: which process, why, and where its log is."""
        code = self.exit_code()
        killed = code is not None and code < 0
        how = f"was killed by {_signal_name(-code)}" if code is not None and killed else f"ended with code {code}"
        said = self.last_error()
        # Killed in the middle of something, it did not say why.
        why = f"; its log ends with: {said}" if killed and said else f": {said or 'no error line'}"
        return f"{self.name} {how}{why} (log: {self.log_path})"

    def last_error(self) -> str:
        """The child's own last word: its "error: ..." line, or the last line that it logged."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start_bytes, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        if said := [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]:
            return said[-1]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals only the first and the last have a name
        return f"signal {number}"
