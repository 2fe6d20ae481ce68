"""Writing one large file past the page cache: buffered writes of new files were 6 to 15 times slower.

The bytes are gathered in one of two aligned buffers and leave it in whole pieces, by a thread, while the other is
filled. The head of the file is kept free until the end, for a header that nobody knows before. Where the file system
takes no direct writes, ordinary ones do.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

PAGE_BYTES = 4096
BUFFER_BYTES = 16 << 20


class DirectFile:
    """A new file at `path`; its first `head_bytes`, whole pages, are written last. Every call may raise OSError, also
    for what an earlier one has handed over."""

    def __init__(self, path: Path, head_bytes: int) -> None:
        if head_bytes % PAGE_BYTES:
            raise ValueError(f"a head of {head_bytes} bytes is not made of whole pages")
        self._fd = _open_direct(path)
        self._buffer, self._other = (mmap.mmap(-1, BUFFER_BYTES) for _ in range(2))  # aligned to a page
        self._held = 0
        self._disk = ThreadPoolExecutor(1, "disk")
        self._writing: Future[None] | None = None
        self._head_bytes, self._written = head_bytes, head_bytes

    @property
    def size(self) -> int:
        """Bytes so far, the head included."""
        return self._written + self._held

    def append(self, piece: memoryview) -> None:
        """Adds bytes behind all others."""
        while len(piece):
            taken = min(len(piece), BUFFER_BYTES - self._held)
            self._buffer[self._held : self._held + taken] = piece[:taken]
            self._held += taken
            piece = piece[taken:]
            if self._held == BUFFER_BYTES:
                self._flush(BUFFER_BYTES)

    def finish(self, head: bytes) -> None:
        """Writes what is left and the head, and returns when all of it is on the disk. Raises OSError."""
        size = self.size
        if self._held:
            padded = -(-self._held // PAGE_BYTES) * PAGE_BYTES
            self._buffer[self._held : padded] = bytes(padded - self._held)
            self._flush(padded)
        self._settle()
        for at in range(0, self._head_bytes, BUFFER_BYTES):
            part = head[at : at + BUFFER_BYTES]
            self._buffer[: len(part)] = part
            _write(self._fd, memoryview(self._buffer)[: len(part)], at)
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def close(self) -> None:
        self._disk.shutdown()
        os.close(self._fd)

    def _flush(self, nbytes: int) -> None:
        self._settle()
        self._writing = self._disk.submit(_write, self._fd, memoryview(self._buffer)[:nbytes], self._written)
        self._buffer, self._other = self._other, self._buffer
        self._written += self._held
        self._held = 0

    def _settle(self) -> None:
        """Returns when what was handed over is written. Raises what came of it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse only after they have made the file
        return os.open(path, flags, 0o666)


def _write(fd: int, piece: memoryview, at: int) -> None:
    while len(piece):
        done = os.pwrite(fd, piece, at)
        if done < len(piece) and done % PAGE_BYTES:  # the rest could not be written directly: there is no room for it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        piece, at = piece[done:], at + done


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, content: bytes) -> None:
    """A small file that is complete or absent under its name, also after a power cut. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
