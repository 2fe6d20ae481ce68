"""A run's folder: names, the lock that says whether the run is alive, and its checkpoints.

runs/NAME/  config.resolved.json  job.json  plan.json  metrics.jsonl  log/
            target_io.safetensors  eval.safetensors  checkpoints/  export/
"""

from __future__ import annotations

import difflib
import fcntl
import os
import struct
from pathlib import Path

from protocol.errors import RequestError

LOCK_NAME = ".lock"
# struct flock: type, whence, start, length (0: all of the file), pid (0 for locks of an open file description).
_FLOCK = "hhqqi0q"


def find_run(name: str, runs: Path = Path("runs")) -> Path:
    """The folder of a run given by path, by name under `runs`, or as "latest". RequestError when there is none."""
    there = {folder.name: folder for folder in sorted(runs.glob("*")) if _is_run(folder)}
    if name == "latest":
        if not (written := {folder: at for folder in there.values() if (at := _last_written(folder))}):
            raise RequestError(f"no run in {runs}/ yet: `draftwire run CONFIG` starts one")
        return max(written, key=lambda folder: written[folder])
    for folder in (Path(name), runs / name):
        if _is_run(folder):
            return folder
    near = difflib.get_close_matches(Path(name).name, there, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise RequestError(f"{name}: no run of that name or path (runs in {runs}/: {', '.join(there) or 'none'}){meant}")


def _is_run(folder: Path) -> bool:
    """Whether a run was started here, is just being prepared, or was once."""
    return any((folder / name).is_file() for name in ("config.resolved.json", "setup.json")) or is_alive(folder)


def _last_written(folder: Path) -> float:
    """When a run last recorded something; one that is being prepared has its lock only. 0: never."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        return metrics.stat().st_mtime
    return (folder / LOCK_NAME).stat().st_mtime if is_alive(folder) else 0.0


class RunLock:
    """Held by the launcher for as long as the run lives; the kernel lets go of it however the launcher ends."""

    def __init__(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RequestError(f"{run_dir}: {error.strerror}; run.dir and run.name say where a run goes") from None
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except BlockingIOError:
            os.close(self._fd)
            raise RequestError(
                f"{run_dir}: this run is alive; `draftwire stop {run_dir}` ends it, or choose another run.name"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def is_alive(run_dir: Path) -> bool:
    """Whether a launcher holds this run's lock. Only asks: taking it, however briefly, could make a start fail."""
    try:
        fd = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def launcher_pid(run_dir: Path) -> int | None:
    """The process that holds this run's lock, or None when nobody does."""
    if not is_alive(run_dir):
        return None
    return int((run_dir / LOCK_NAME).read_text() or "0") or None
