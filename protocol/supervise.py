"""Child processes: started by argument list, named, logged to a file each, ended by recorded pid.

A child is its own process group, so that Ctrl-C reaches only the launcher, and holds nothing of the launcher's but
the descriptors it is given.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from protocol.child import ERROR_PREFIX, LAUNCHER_VARIABLE

TAIL_BYTES = 4000
TAIL_LINES = 10
# A killed process ends within milliseconds; one with tens of GiB on a device takes a few seconds.
REAP_S = 30.0


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
        # Readable from the moment when the process has ended.
        self._exit_fd: int | None = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for death by a signal. A code means that it has been reaped."""
        code = self._process.poll()
        if code is not None and self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None
        return code

    @property
    def exit_fd(self) -> int | None:
        """A descriptor that is readable once the process has ended; None after it has been reaped."""
        return self._exit_fd

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.exit_code()

    def kill(self) -> None:
        """KILL, without waiting for the end."""
        if self.exit_code() is None:
            self._process.kill()

    def end(self, grace_s: float) -> bool:
        """TERM, `grace_s` of patience, then KILL. Whether it was reaped: what hangs in the kernel is not, in REAP_S."""
        if self.exit_code() is None:
            self._process.terminate()
        if self.wait(grace_s) is None:
            self._process.kill()
        return self.wait(REAP_S) is not None

    def how(self) -> str:
        """How it ended, in a few words: "was killed by SIGKILL"."""
        code = self.exit_code()
        return f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"ended with code {code}"

    def obituary(self) -> str:
        """One line: which process, why, and where its log is."""
        code, said = self.exit_code(), self.last_error()
        killed = code is not None and code < 0
        # Killed in the middle of something, it did not say why.
        why = f"; its log ends with: {said}" if killed and said else f": {said or 'no error line'}"
        return f"{self.name} {self.how()}{why} (log: {self.log_path})"

    def tail(self) -> list[str]:
        """The last TAIL_LINES lines of its log, blank ones left out."""
        return [line for line in self._log_lines() if line.strip()][-TAIL_LINES:]

    def last_error(self) -> str:
        """The child's own last word: its "error: ..." line, or the last line that it logged."""
        lines = self._log_lines()
        if said := [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]:
            return said[-1]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _log_lines(self) -> list[str]:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start_bytes, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []


def await_news(children: Iterable[Child], fds: Iterable[int], timeout_s: float) -> None:
    """Returns as soon as one of the children ends or a descriptor is readable, after `timeout_s` at the latest."""
    poller = select.poll()
    for fd in (*(child.exit_fd for child in children), *fds):
        if fd is not None:
            poller.register(fd, select.POLLIN)
    poller.poll(timeout_s * 1000)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals only the first and the last have a name
        return f"signal {number}"
