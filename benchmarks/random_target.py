"""A model folder with random weights of a given shape, a tokenizer with a chat template, and chats to train on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "tests/templates/qwen3_5.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = [f"{head}{tail}" for head in "bdfgklmnprstvz" for tail in ("a", "en", "il", "or", "ust", "ain", "ept", "oth")]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


WRITES_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def write_target(folder: Path, config: dict[str, Any], device: str) -> None:
    """A causal language model of a text `config`, in bf16, with its tokenizer."""
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = auto.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16)
    # As trained models begin (GPT-2, section 2.3): the residual stream does not grow with depth, nor rounding in it.
    for name, weight in model.named_parameters():
        if name.endswith(WRITES_RESIDUAL):
            weight.data *= (2 * config["num_hidden_layers"]) ** -0.5
    model.save_pretrained(folder, max_shard_size="5GB")
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """About one token a word of WORDS, few for what the template writes; ids below 1,000, far from those of the special
    tokens of real models, which stay unused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.train_from_iterator([" " + " ".join(WORDS), template] * 3, trainer)
    fast: Any = transformers.PreTrainedTokenizerFast
    wrapped = fast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


def write_chats(path: Path, rows: int, seed: int, mean_words: float) -> None:
    """Questions with tools, thinking, a call, its result and an answer; lengths are log-normal, as in thinking data."""
    draw = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            file.write(json.dumps({"messages": list(_turns(draw, mean_words)), "tools": TOOLS}) + "\n")


def _turns(draw: np.random.Generator, mean_words: float) -> Iterator[dict[str, Any]]:
    def words(mean: float) -> str:
        count = int(np.clip(np.exp(draw.normal(np.log(mean) - 0.4, 0.9)), 4, 8 * mean))
        return " ".join(WORDS[index] for index in draw.integers(0, len(WORDS), count))

    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": words(4)}}}
    yield {"role": "user", "content": words(60)}
    yield {"role": "assistant", "reasoning_content": words(0.5 * mean_words), "content": "", "tool_calls": [call]}
    yield {"role": "tool", "content": words(80)}
    yield {"role": "assistant", "reasoning_content": words(0.3 * mean_words), "content": words(0.2 * mean_words)}
