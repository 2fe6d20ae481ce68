"""Chunks tokenised by several processes, results in the order of the chunks, memory bounded.

One process is started anew, loads what tokenising takes, and forks into as many as are wanted (tokeniser.py). This
process is not forked: it may run threads, a tokenizer's among them, and a fork of those can hang for ever.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue

from producer.chunks import Chunk, Done, tokenise_chunk
from producer.config import SourceConfig
from producer.samples import SampleMaker
from producer.tokeniser import Work
from protocol.errors import RunError

_AHEAD_PER_WORKER = 3
_COMMAND = (sys.executable, "-P", "-m", "producer.tokeniser")


def tokenised(
    chunks: Iterable[Chunk], maker: SampleMaker, sources: Sequence[SourceConfig], workers: int
) -> Iterator[tuple[Chunk, Done]]:
    """Every chunk with what it became, in order; `workers` 1 works in this process. Raises RunError when a process
    dies."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, tokenise_chunk(maker, sources, chunk)
        return
    work = bytes(ForkingPickler.dumps(Work(maker.tokenizer, maker.vocab_size, maker.max_length, list(sources))))
    processes, connections = _started(workers)
    idle: SimpleQueue[Connection] = SimpleQueue()
    waiting: deque[tuple[Chunk, Future[Done]]] = deque()
    with ThreadPoolExecutor(workers) as threads:
        try:
            for connection in connections:
                threads.submit(_send, connection, work, idle)
            for chunk in chunks:
                waiting.append((chunk, threads.submit(_ask, idle, chunk)))
                if len(waiting) >= workers * _AHEAD_PER_WORKER:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        except BaseException:
            # With the one that forked all others end, and so does every thread that waits for one of them.
            processes.kill()
            for _, future in waiting:
                future.cancel()
            raise
        finally:
            threads.shutdown()
            for connection in connections:
                connection.close()  # which ends a process
            processes.wait()


def _started(workers: int) -> tuple[subprocess.Popen[bytes], list[Connection]]:
    """The processes, by the one that forks, and a connection to each."""
    pairs = [socket.socketpair() for _ in range(workers)]
    theirs = [end.fileno() for _, end in pairs]
    # What is importable here is importable there, and nothing else is. A process that forks runs no threads.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **single, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = subprocess.Popen(
        [*_COMMAND, str(os.getpid()), *map(str, theirs)], pass_fds=theirs, stdin=subprocess.DEVNULL, env=environment
    )
    for _, end in pairs:
        end.close()
    return processes, [Connection(end.detach()) for end, _ in pairs]


def _send(connection: Connection, work: bytes, idle: SimpleQueue[Connection]) -> None:
    """Tells a process what it works with. One that is dead by then shows when it is asked."""
    with suppress(OSError):
        connection.send_bytes(work)
    idle.put(connection)


def _ask(idle: SimpleQueue[Connection], chunk: Chunk) -> Done:
    connection = idle.get()
    try:
        connection.send(chunk)
        answer: Done | Exception = connection.recv()
    except (OSError, EOFError):
        raise RunError(
            "prepare: a tokenising process died, perhaps for lack of memory; use fewer with --workers, it goes on"
        ) from None
    finally:
        idle.put(connection)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _next(waiting: deque[tuple[Chunk, Future[Done]]]) -> tuple[Chunk, Done]:
    chunk, future = waiting.popleft()
    return chunk, future.result()
