"""Permissions of files that a library writes for us."""

from __future__ import annotations

from pathlib import Path


def open_to_others(path: Path) -> None:
    """Gives a file the permissions that a plain `open` would have given it: safetensors writes files that only their
    owner may read, and a drafter is made to be served by somebody else."""
    status = Path("/proc/self/status").read_text()
    umask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    path.chmod(0o666 & ~umask)
