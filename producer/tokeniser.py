"""The processes that tokenise: `python -P -m producer.tokeniser PARENT FD...`, started by pool.py.

Loads the code once, without a thread, and forks into one process for each connected socket FD. Each reads what it
works with, then chunks, and answers each with what it became, or with the error that draftwire raises on purpose.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import transformers.tokenization_utils_tokenizers  # noqa: F401  # what reading a tokenizer imports; no torch

from producer.chunks import tokenise_chunk
from producer.config import SourceConfig
from producer.samples import SampleMaker
from protocol.child import die_with
from protocol.errors import DraftwireError

_COLLECT_OBJECTS = 100_000


@dataclass(frozen=True)
class Work:
    """What a process works with."""

    tokenizer: Any
    vocab_size: int
    max_length: int | None
    sources: Sequence[SourceConfig]


def main(parent: int, descriptors: Sequence[int]) -> None:
    """Returns when all processes have ended; ends at once when one did not end well."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # What is loaded by now is not looked through again and again, nor copied by the fork for that; rows leave few
    # cycles behind, and a collection for every 700 objects was a twentieth of all time.
    gc.freeze()
    gc.set_threshold(_COLLECT_OBJECTS)
    server = os.getpid()
    for descriptor in descriptors:
        if os.fork() == 0:
            die_with(server)
            for other in set(descriptors) - {descriptor}:
                os.close(other)
            _work(Connection(descriptor))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        _, status = os.wait()
        if status:
            os._exit(1)  # takes the others along: a row that is lost is no row that was skipped


def _work(connection: Connection) -> None:
    try:
        work: Work = connection.recv()
        maker = SampleMaker(work.tokenizer, work.vocab_size, work.max_length)
        while True:
            chunk = connection.recv()
            try:
                connection.send(tokenise_chunk(maker, work.sources, chunk))
            except DraftwireError as error:
                connection.send(error)
    except (EOFError, OSError):
        return  # the reading process is done, or gone


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]])
