"""The default target out of the installed wheel: conversion, reuse, repair, and a sane answer."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer import embedded
from producer.config import TargetConfig
from producer.generate import greedy_answers
from producer.locate import read_target_facts
from producer.target import load_target, stop_ids
from producer.template import load_tokenizer

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (embedded.PACKAGE, "gguf", "accelerate")),
    reason=f"the embedded target is not installed: {embedded.INSTALL_HINT}",
)
# Bit for bit what two transformers releases (5.17 and 5.24) make of the file.
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWIRE_CACHE", str(root))
        yield root


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    return embedded.embedded_target()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_at_once_convert_once(cache: Path) -> None:
    said: list[str] = []
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(embedded.embedded_target(said.append))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(said) == 1
    assert said[0].endswith("96.58 MB of weights become 269 MB as bfloat16")
    assert len(set(found)) == 1
    assert sorted(path.name for path in (cache / "targets").iterdir()) == [
        "SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct.lock",
    ]


def test_weights_and_facts(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"] == WEIGHTS_SHA256
    facts = read_target_facts(folder)
    assert (facts["num_layers"], facts["hidden_size"], facts["vocab_size"]) == (30, 576, 49152)
    assert (facts["tied"], facts["rope_theta"], facts["eos_token_id"], facts["dtype"]) == (True, 1e5, 2, "bfloat16")


def test_digits_are_split_as_the_model_was_trained(folder: Path) -> None:
    """E4: the original's tokens, with accents, digits and emoji."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("a  12 caf\u00e9 \U0001f642", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["a", "\u0120\u0120", "1", "2"]
    assert tokenizer.decode(ids) == "a  12 caf\u00e9 \U0001f642"


def test_damaged_folders_are_noticed(folder: Path) -> None:
    assert embedded.is_sound(folder)
    path = folder / "generation_config.json"
    content = path.read_bytes()
    for damage in (content.replace(b"2", b"4", 1), content[:-5]):
        path.write_bytes(damage)
        assert not embedded.is_sound(folder)
    path.unlink()
    assert not embedded.is_sound(folder)
    path.write_bytes(content)
    assert embedded.is_sound(folder)


def test_the_capital_of_france(folder: Path) -> None:
    """E4: a model whose weights went astray would not know."""
    target = load_target(folder, TargetConfig(), "cpu")
    tokenizer = load_tokenizer(folder)
    questions = ["What is the capital of France?", "Say hello."]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    answers = greedy_answers(target, prompts, max_new_tokens=12, stop_ids=stop_ids(target, tokenizer), batch_rows=2)
    assert tokenizer.decode(answers[0]) == "The capital of France is Paris.<|im_end|>"
    assert len(answers[1]) > 1
