"""How fast `prepare` is against the tokenizer alone, and how long a large dataset takes to open and to shuffle.

    python benchmarks/data.py [--rows 60000] [--samples 1000000] [--json]

Both sides of the first ratio work on the same conversations in the same run: the tokenizer gets texts that are rendered
already and uses its threads on all cores; prepare reads the file, renders, tokenises, masks and writes. Limits: 0.6 of
the tokenizer's speed, 1 s to open a million samples.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from report import publish, row

from producer.config import DataConfig, SourceConfig, TargetConfig
from producer.locate import locate_target, read_target_facts
from producer.prepare import prepare
from producer.template import Template, load_tokenizer
from protocol.dataset import TokenDataset
from protocol.keyed import permutation

EXAMPLE = Path(__file__).parents[1] / "examples/quickstart/train.jsonl"
REACH, OPEN_S, SHUFFLE_S = 0.6, 1.0, 10.0


def prepare_speed(rows: int, folder: Path) -> list[dict[str, object]]:
    """Tokens per second of the tokenizer alone and of prepare with as many processes as there are cores."""
    target = locate_target(TargetConfig())
    tokenizer, facts = load_tokenizer(target), read_target_facts(target)
    lines = EXAMPLE.read_text().splitlines()
    chats = [lines[place % len(lines)] for place in range(rows)]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(chats) + "\n")
    cores = len(os.sched_getaffinity(0))
    data = DataConfig(train=[SourceConfig(path=str(path))], max_length=65_536)
    started = time.perf_counter()
    dataset = prepare(data, tokenizer, facts, folder / "dataset", workers=cores)
    speed = int(dataset.lengths.sum()) / (time.perf_counter() - started)
    # Before the tokenizer's lists of ids: a child's peak includes what its parent held when it started.
    peaks = [resource.getrusage(whose).ru_maxrss / 2**20 for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    template = Template(tokenizer)
    texts = [template.render(json.loads(line)["messages"]) for line in chats]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    started = time.perf_counter()
    counts = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    alone = sum(counts) / (time.perf_counter() - started)
    return [
        row(f"prepare, {cores} processes, {rows} rows (reach {REACH} of the tokenizer)", speed, "tokens/s", alone),
        row("peak memory of the reading process", peaks[0], "GiB", 1.0),
        row("peak memory of a tokenising process", peaks[1], "GiB", 1.0),
    ]


def large_dataset(samples: int, folder: Path) -> list[dict[str, object]]:
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
