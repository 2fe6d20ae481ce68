"""Chunks tokenised by several processes, results in the order of the chunks, memory bounded.

The processes are spawned: a fork of a process that runs threads, a tokenizer's among them, can hang for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from producer.chunks import Chunk, Done, tokenise_chunk
from producer.config import SourceConfig
from producer.samples import SampleMaker
from protocol.child import die_with
from protocol.errors import RunError

_AHEAD_PER_WORKER = 3
# What this process tokenises with, once `_begin` has run in it.
_state: tuple[SampleMaker, Sequence[SourceConfig]] | None = None


def tokenised(
    chunks: Iterable[Chunk], maker: SampleMaker, sources: Sequence[SourceConfig], workers: int
) -> Iterator[tuple[Chunk, Done]]:
    """Every chunk with what it became, in order; `workers` 1 works in this process. Raises RunError when a process
    dies."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, tokenise_chunk(maker, sources, chunk)
        return
    arguments = (os.getpid(), maker.tokenizer, maker.vocab_size, maker.max_length, list(sources))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, arguments)
    waiting: deque[tuple[Chunk, Future[Done]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_work, chunk)))
            if len(waiting) >= workers * _AHEAD_PER_WORKER:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except BrokenProcessPool:
        raise RunError(
            "prepare: a tokenising process died, perhaps for lack of memory; use fewer with --workers, it goes on"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[tuple[Chunk, Future[Done]]]) -> tuple[Chunk, Done]:
    chunk, future = waiting.popleft()
    return chunk, future.result()


def _begin(parent: int, tokenizer: Any, vocab_size: int, max_length: int | None, sources: list[SourceConfig]) -> None:
    global _state
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _state = SampleMaker(tokenizer, vocab_size, max_length), sources


def _work(chunk: Chunk) -> Done:
    assert _state is not None
    return tokenise_chunk(*_state, chunk)
