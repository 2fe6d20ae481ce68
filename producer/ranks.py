"""A target on the devices of one producer: whole on one, or divided over several by transformers' own plan.

This process is the first rank. It alone decides, taps and publishes; for each other device it starts a follower
(`producer.follower`), which dies with it. When a follower dies, this process ends at once: it may be inside a
collective that would wait for the dead one for hours.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch.distributed as dist

from producer.config import TargetConfig
from producer.group import Rank, join_group
from producer.mirror import Command, encode
from producer.target import Target, load_target
from protocol.child import ERROR_PREFIX, FAILED_FOR_GOOD, WRONG_REQUEST
from protocol.errors import RunError
from protocol.supervise import Child

# For followers that are told to end: their work is done, what is left is to give memory back.
GRACE_S = 20.0
# What goes wrong here may be a follower's death, which is then told instead.
NOTICE_S = 2.0


@contextmanager
def loaded(folder: Path, config: TargetConfig, devices: Sequence[str], log_path: Path) -> Iterator[Target]:
    """The target out of the local model `folder` on `devices`, as many as target.tensor_parallel says.

    Rank i of several logs beside `log_path`, under its name with ".i" behind. Called by the main thread: a follower
    dies with the thread that started it. Raises RequestError as `load_target` does.
    """
    if len(devices) == 1:
        yield load_target(folder, config, devices[0])
        return
    store_fd = os.memfd_create("ranks", os.MFD_CLOEXEC)
    followers = Followers([Rank(rank, tuple(devices), str(folder), config) for rank in range(1, len(devices))])
    try:
        followers.start(store_fd, log_path)
        join_group(0, tuple(devices), store_fd)
        yield replace(load_target(folder, config, devices[0]), mirror=followers)
        followers.release()
        dist.destroy_process_group()
    finally:
        followers.end()
        os.close(store_fd)


class Followers:
    """The other ranks, as processes that do what they are told (`producer.mirror`)."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._children: list[Child] = []
        self._pipes: list[int] = []
        self._over_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._watch = threading.Thread(target=self._end_with_them, name="ranks", daemon=True)

    def start(self, store_fd: int, log_path: Path) -> None:
        for rank in self._ranks:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            arguments = [msgspec.json.encode(rank).decode(), str(store_fd), str(read_fd)]
            name = f"{log_path.stem}.{rank.rank}"
            own_log_path = log_path.with_name(f"{name}{log_path.suffix}")
            child = Child(name, "producer.follower", arguments, own_log_path, pass_fds=[store_fd, read_fd])
            os.close(read_fd)
            self._children.append(child)
            self._pipes.append(write_fd)
        self._watch.start()

    def tell(self, command: Command) -> None:
        frame = encode(command)
        try:
            for pipe in self._pipes:
                left = memoryview(frame)
                while left:
                    left = left[os.write(pipe, left) :]
        except BrokenPipeError:
            raise RunError("a rank of the target no longer listens") from None

    def release(self) -> None:
        """Nothing more is told, and nobody's end is unexpected from now on."""
        os.eventfd_write(self._over_fd, 1)
        if self._watch.is_alive():
            self._watch.join()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []

    def end(self) -> None:
        """Waits for followers that were released, kills any others, and returns when all are reaped."""
        if not (released := not self._pipes):
            self._watch.join(NOTICE_S)
        self.release()
        for child in self._children:
            if not released or child.wait(GRACE_S) is None:
                child.kill()
            child.end(0.0)
        os.close(self._over_fd)

    def _end_with_them(self) -> None:
        """Ends this process, in words and with the exit code of the first follower that ends before it is released."""
        poller = select.poll()
        poller.register(self._over_fd, select.POLLIN)
        for child in self._children:
            assert child.exit_fd is not None
            poller.register(child.exit_fd, select.POLLIN)
        if self._over_fd in (ready := [fd for fd, _ in poller.poll()]):
            return
        child = next(child for child in self._children if child.exit_fd in ready)
        code = child.wait(0.0)
        if code not in (WRONG_REQUEST, FAILED_FOR_GOOD):  # these it has explained in one line
            tail = "".join(f"\n    {line}" for line in child.tail())
            print(f"the end of {child.log_path}:{tail}", file=sys.stderr)
        print(f"{ERROR_PREFIX}a rank of the target is gone: {child.obituary()}", file=sys.stderr, flush=True)
        os._exit(code if code is not None and code > 0 else 1)
