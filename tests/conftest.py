"""Shared fixtures: a tiny chat tokenizer and tiny random targets, built on the spot."""

from __future__ import annotations

import gc
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?", "user assistant system"]


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Builds a byte-level fast tokenizer of 384 ids; `adds_start` makes it add `<s>` by itself."""

    def make(template: str = CHATML, adds_start: bool = False, pad: bool = False) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        specials = ["<unk>", "<s>", "<|im_start|>", "<|im_end|>", "<|spare|>", "<pad>"]
        trainer = trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS * 3, trainer)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        if adds_start:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            )
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="<|im_end|>",
            **({"pad_token": "<pad>"} if pad else {}),
            additional_special_tokens=["<|im_start|>", "<|spare|>"],
        )
        wrapped.chat_template = template
        return wrapped

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """Builds a tiny random causal LM, "llama", "qwen3" or "gemma3", in float32 and eval mode."""

    def make(kind: str = "llama", **changes: Any) -> Any:
        import torch
        import transformers

        sizes: dict[str, Any] = {
            "vocab_size": 400,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 3,
            "pad_token_id": None,
            **changes,
        }
        configs = {
            "llama": transformers.LlamaConfig,
            "qwen3": transformers.Qwen3Config,
            "gemma3": transformers.Gemma3TextConfig,
        }
        torch.manual_seed(0)
        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_config(configs[kind](**sizes), dtype=torch.float32).eval()

    return make


@pytest.fixture
def make_folder(
    tmp_path: Path, make_model: Callable[..., Any], make_tokenizer: Callable[..., Any]
) -> Callable[..., Path]:
    """Saves a tiny random target with its tokenizer as a model folder and returns the folder."""

    def make(kind: str = "llama", name: str = "target", max_shard_size: str = "1GB", **changes: Any) -> Path:
        folder = tmp_path / name
        make_model(kind, **changes).save_pretrained(folder, max_shard_size=max_shard_size)
        make_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def make_chats(tmp_path: Path) -> Callable[..., Path]:
    """Writes a JSONL file of short conversations, all different, and returns its path."""

    def make(rows: int, name: str = "chats.jsonl", first: int = 0) -> Path:
        words = [word.strip(",?") for sentence in CORPUS for word in sentence.split()]
        path = tmp_path / name
        with path.open("w") as file:
            for row in range(first, first + rows):
                question = " ".join(words[(row * 7 + place * place) % len(words)] for place in range(3 + row % 4))
                answer = " ".join(words[(row * 3 + place * 5) % len(words)] for place in range(4 + row % 9))
                turns = [
                    {"role": "user", "content": f"{row} {question}"},
                    {"role": "assistant", "content": f"{answer} {row}"},
                ]
                file.write(json.dumps({"messages": turns}) + "\n")
        return path

    return make


@pytest.fixture
def open_fds() -> Callable[[], int]:
    """Counts this process's open descriptors, after a garbage collection."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count
