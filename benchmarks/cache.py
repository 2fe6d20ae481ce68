"""What a disk cache costs and gives: its rates beside the disk's own, and whole runs with and without it.

    python benchmarks/cache.py [CONFIG] [--folder .] [--parts disk runs] [--mb 512] [--repeats 3] [--device auto|cpu]
                               [--seconds 20] [--set A.B=C ...] [--json]

disk: samples of 335 tokens, 17 MB each in bf16, into shards and back as replay reads them, by as many threads. The
references are the same bytes in the same run, written and read past the page cache in pieces of the writer's buffer, by
as many threads. Rates are of bytes on the disk: those of fp8 stand for twice as many in bf16. Nothing of a shard is in
the page cache when it is read. Passes come in another order in each repetition; a row is the median.

runs: `draftwire run` of CONFIG (default: the quick start) with cache.mode "off", "spill" and "only", from the command
to its end, and the epochs after the first from the cache beside one rank without any producer (consumer/alone.py), the
same processes and blocks. Where a mode is refused the reason is printed, and `cache build` fills the cache instead.
Settings of CONFIG are changed with --set; train.epochs must be 2 at least.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from cache_disk import disk_rows
from cache_runs import run_rows
from report import publish

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("disk", "runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "quickstart.toml"))
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is meant")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mb", type=int, default=512, help="features of a pass, in bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: the runs see no GPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long one rank trains alone")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        if "disk" in asked.parts:
            rows += disk_rows(Path(folder) / "disk", asked.mb << 20, asked.repeats, say)
        if "runs" in asked.parts:
            rows += run_rows(asked.config, asked.overrides, Path(folder), asked.device, asked.seconds, say)
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
