"""The token dataset made by a process of its own, before anything else of a run is decided.

    python -P -m producer.prepare_alone ARGS.json

With `data.max_length = "auto"` the data itself says how long samples are, and with that how much memory a run takes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from producer.locate import read_target_facts
from producer.prepare import prepare, report_of
from producer.preparing import describe
from producer.setup_args import PrepareArgs
from producer.template import load_tokenizer
from protocol.child import run_child
from protocol.errors import RequestError


def main(path: str) -> None:
    """Prepares what the JSON file `path` describes. Raises RequestError."""
    try:
        args = msgspec.json.decode(Path(path).read_bytes(), type=PrepareArgs)
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path}: {error}") from None
    folder = Path(args.target_dir)
    tokenizer = load_tokenizer(folder, args.target.trust_remote_code)
    facts = read_target_facts(folder)
    dataset = prepare(args.data, tokenizer, facts, Path(args.dataset_dir), lambda line: print(line, flush=True))
    print(*describe(report_of(dataset)), sep="\n", flush=True)


if __name__ == "__main__":
    run_child("prepare", lambda: main(sys.argv[1]))
