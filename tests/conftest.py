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


# What a kind of target has beside the common sizes: one full period of a hybrid's layers, windows shorter than the
# sequences that tests run.
HYBRID = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {**MIXED_WINDOWS, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", MIXED_WINDOWS),
    "qwen3_5": ("Qwen3_5TextConfig", HYBRID),
    "qwen3_5_multimodal": ("Qwen3_5Config", HYBRID),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "gpt_oss": ("GptOssConfig", {**MIXED_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """Builds a tiny random target of a kind of TARGETS, in float32 and eval mode: 4 layers, hidden 32, 400 tokens."""

    def make(kind: str = "llama", **changes: Any) -> Any:
        import torch
        import transformers

        name, own = TARGETS[kind]
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
            **own,
            **changes,
        }
        auto: Any = transformers.AutoModelForCausalLM
        if kind.endswith("_multimodal"):
            auto = transformers.AutoModelForImageTextToText
            sizes = {"text_config": sizes, "vision_config": VISION, "image_token_id": 5, "video_token_id": 6}
        torch.manual_seed(0)
        return auto.from_config(getattr(transformers, name)(**sizes), dtype=torch.float32).eval()

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


@pytest.fixture
def make_drafter() -> Callable[..., Any]:
    """Builds a tiny drafter with fresh weights: hidden 16, two taps, block size 4, vocabulary 40, mask token 39."""

    def make(seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
        import torch

        from consumer.drafter import Drafter, initialise
        from consumer.shape import DrafterShape

        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "target_layer_ids": (1, 3),
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 8,
            "intermediate_size": 24,
            "block_size": 4,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
            "vocab_size": 40,
            "mask_token_id": 39,
            "layer_types": ("sliding_attention", "full_attention"),
            "sliding_window": 5,
            "is_causal": None,
            "num_target_layers": 6,
            "max_position_embeddings": 64,
            "eos_token_ids": (0,),
            "pad_token_id": None,
            "bos_token_id": None,
            "input_embedding_scale": 1.0,
            **changes,
        }
        drafter = Drafter(DrafterShape(**sizes), getattr(torch, dtype))
        initialise(drafter, seed)
        return drafter

    return make


@pytest.fixture
def make_snapshot(make_drafter: Callable[..., Any]) -> Callable[..., Any]:
    """A snapshot before `step` with small tensors of every dtype that a checkpoint may hold."""

    def make(step: int, seed: int = 0, best: float = 0.0) -> Any:
        import torch

        from consumer.checkpoint import Snapshot
        from protocol.cursor import Cursor

        drafter = make_drafter(seed, "bfloat16")
        masters = {f"master.{name}": tensor.detach().clone() for name, tensor in drafter.named_parameters()}
        state = masters | {
            "exp_avg.fc.weight": torch.full((3,), float(seed)),
            "step.fc.weight": torch.tensor(float(step)),
        }
        quarantined = {"3": "tap 1 is all zero"}
        cursor = Cursor(epoch=0, next_step=step, plan_hash="p", step_hash="s", quarantined=quarantined)
        return Snapshot(drafter.shape, torch.bfloat16, state, cursor, "fingerprint", best)

    return make


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Any]:
    """Builds a Job of one producer and one consumer on the CPU; `plan` changes its plan's parameters."""

    def make(plan: dict[str, Any] | None = None, **changes: Any) -> Any:
        from protocol.job import Job
        from protocol.plan import PlanParams

        params = {
            "seed": 0,
            "epochs": 1,
            "batch_tokens": 200,
            "anchors": 4,
            "block_size": 4,
            "microbatch_tokens": 200,
            "microbatch_draft_tokens": 64,
            "consumers": 1,
            **(plan or {}),
        }
        fields = {
            "run_id": "r",
            "incarnation": 1,
            "address": "",
            "transport": "shm",
            "payload_address": "",
            "target_dir": "",
            "padding_mask": True,
            "dataset_dir": "",
            "taps": (0,),
            "width": 8,
            "dtype": "float32",
            "slots": 4,
            "slot_bytes": 4096,
            "schema": "s",
            "shape": {},
            "plan": PlanParams(**params),
            "plan_hash": "",
            "start_step": 0,
            "checkpoint": None,
            "quarantined": {},
            "producers": ("cpu",),
            "consumers": ("cpu",),
            "producer_bytes": 0,
            "consumer_bytes": 0,
            "quarantine_limit": 0.0,
            "hang_s": 300.0,
            **changes,
        }
        return Job(**fields)

    return make
