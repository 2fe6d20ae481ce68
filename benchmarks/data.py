"""How fast `prepare` is against the tokenizer alone, and how long a large dataset takes to open and to shuffle.

    python benchmarks/data.py [--rows 60000] [--samples 1000000] [--json]

Both sides of the first ratio work on the same conversations in the same run: the tokenizer gets texts that are rendered
already and uses its threads on all cores; prepare reads the file, starts its processes, renders, tokenises, masks and
writes. To reach: 0.6 of the tokenizer's speed, memory that a tenfold of rows does not change, 1 s to open a million
samples and seconds to shuffle them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import publish, row

from producer.config import DataConfig, SourceConfig, TargetConfig
from producer.locate import locate_target, read_target_facts
from producer.prepare import prepare
from producer.template import Template, load_tokenizer
from protocol.dataset import TokenDataset
from protocol.keyed import permutation

EXAMPLE = Path(__file__).parents[1] / "examples/quickstart/train.jsonl"
OPEN_S, SHUFFLE_S = 1.0, 10.0
GIB = 2**30


class Speed(NamedTuple):
    """Tokens per second on the clock, and per second of all processors' time."""

    by_time: float
    by_cpu: float


class Peaks:
    """The most memory that this process and any one of those below it take while this is entered, in bytes."""

    def __enter__(self) -> Peaks:
        Path("/proc/self/clear_refs").write_text("5")  # this process's peak begins anew
        self.below = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *what: object) -> None:
        self._stop.set()
        self._thread.join()
        self.own = peak_bytes(os.getpid())

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            # One that has not become another program yet still has this one's memory.
            below = [pid for pid in processes_below(os.getpid()) if b"producer.tokeniser" in command_line(pid)]
            self.below = max([self.below, *map(peak_bytes, below)])


def processes_below(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task").glob("*/children")
    found = [int(pid) for path in children for pid in path.read_text().split()]
    return found + [pid for child in found for pid in processes_below(child)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def peak_bytes(pid: int) -> int:
    """Of anonymous and mapped pages; 0 of a process that has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def prepared(rows: int, folder: Path, tokenizer: Any, facts: dict[str, Any], cores: int) -> tuple[int, Speed, Peaks]:
    """Tokens that `prepare` made of so many rows, how fast, and the memory that it took."""
    lines = EXAMPLE.read_text().splitlines()
    path = folder / f"{rows}.jsonl"
    with path.open("w") as stream:
        stream.writelines(f"{lines[place % len(lines)]}\n" for place in range(rows))
    data = DataConfig(train=[SourceConfig(path=str(path))], max_length=65_536)
    with Peaks() as peaks:
        started, spent = time.perf_counter(), cpu_s()
        dataset = prepare(data, tokenizer, facts, folder / f"{rows}", workers=cores)
        took = time.perf_counter() - started, cpu_s() - spent
    tokens = int(dataset.lengths.sum())
    return tokens, Speed(tokens / took[0], tokens / took[1]), peaks


def tokenised(rows: int, tokenizer: Any) -> Speed:
    """How fast the tokenizer is alone, on the same texts, on all cores."""
    lines, template = EXAMPLE.read_text().splitlines(), Template(tokenizer)
    texts = [template.render(json.loads(lines[place % len(lines)])["messages"]) for place in range(rows)]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    started, spent = time.perf_counter(), cpu_s()
    tokens = sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    return Speed(tokens / (time.perf_counter() - started), tokens / (cpu_s() - spent))


def prepare_speed(rows: int, folder: Path) -> list[dict[str, Any]]:
    """Of so many rows and of a tenth of them."""
    target = locate_target(TargetConfig())
    tokenizer, facts = load_tokenizer(target), read_target_facts(target)
    cores = len(os.sched_getaffinity(0))
    sizes = (rows // 10, rows)
    # Before the tokenizer's lists of ids, which stay in this process's memory.
    made = {count: prepared(count, folder, tokenizer, facts, cores) for count in sizes}
    found = []
    for count, (tokens, speed, _) in made.items():
        alone = tokenised(count, tokenizer)
        name = f"prepare, {cores} processes, {count} rows, {tokens} tokens"
        found.append(row(name, speed.by_time, "tokens/s", alone.by_time))
        found.append(row("  the same by CPU time, if others run here", speed.by_cpu, "tokens/CPU s", alone.by_cpu))
    few, many = (made[count][2] for count in sizes)
    found.append(row("reading process, against a tenth of the rows", many.own / GIB, "GiB", few.own / GIB))
    found.append(row("a tokenising process, against a tenth of the rows", many.below / GIB, "GiB", few.below / GIB))
    return found


def cpu_s() -> float:
    """CPU seconds of this process and of those below it that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def large_dataset(samples: int, folder: Path) -> list[dict[str, Any]]:
    """Seconds to open a dataset of this many samples, and to shuffle it."""
    lengths = np.full(samples, 16, dtype=np.int64)
    folder.mkdir()
    np.save(folder / "offsets.npy", np.concatenate(([0], np.cumsum(lengths))))
    np.save(folder / "anchors.npy", np.ones(samples, dtype=np.int32))
    np.zeros(int(lengths.sum()), dtype=np.int32).tofile(folder / "tokens.bin")
    np.zeros(int(lengths.sum()), dtype=np.uint8).tofile(folder / "mask.bin")
    (folder / "meta.json").write_text(json.dumps({"fingerprint": "f"}))
    started = time.perf_counter()
    count = len(TokenDataset.open(folder))
    opened = time.perf_counter() - started
    started = time.perf_counter()
    permutation(count, 0, 1)
    shuffled = time.perf_counter() - started
    return [
        row(f"open {samples} samples", opened, "s", OPEN_S),
        row(f"shuffle {samples} samples", shuffled, "s", SHUFFLE_S),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = prepare_speed(arguments.rows, Path(name))
        rows += large_dataset(arguments.samples, Path(name) / "large")
    publish(rows, arguments.json)


if __name__ == "__main__":
    main()
