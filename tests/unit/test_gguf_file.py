"""Case E4 of the public failure reports: what a GGUF file becomes, on a tiny one of a known model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from producer.config import TargetConfig
from producer.embedded import rebuilt_tokenizer
from producer.gguf_file import load_gguf, unpacked_size
from producer.locate import locate_target
from protocol.errors import RequestError

needs_gguf = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")), reason="gguf is not installed"
)
LAYERS, HEADS, KV_HEADS = 2, 4, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def tokenizer() -> Any:
    """Byte-level, with a digit split and a merge of two spaces, as the embedded target's is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        ["a  12", "the caf\u00e9 and the river  7", "don't  go   there, na\u00efve \U0001f642"] * 9, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    return make_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True)


def gguf_name(name: str) -> str:
    """A tensor's name there: blk.0.attn_q.weight for model.layers.0.self_attn.q_proj.weight."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a rotated projection in the order that this format keeps them in."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, model: Any, tokenizer: Any, renamed: dict[str, str] | None = None) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(400)
    stored = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if place < 3 else 1 for place in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    for token, add in enumerate((writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id)):
        add(token)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            weight = tensor.numpy()
            heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
            weight = weight if heads is None else interleaved(weight, heads)
            there = (renamed or {}).get(gguf_name(name), gguf_name(name))
            writer.add_tensor(there, weight.astype(np.float16) if weight.ndim > 1 else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@needs_gguf
def test_its_weights_are_the_model_s_and_its_tokens_the_tokenizer_s(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    """E4: accents, emoji and digits give the original's tokens; the dtype is the one that was announced."""
    path = write(tmp_path / "tiny.gguf", model, tokenizer)
    text = "the na\u00efve caf\u00e9  at 1234 rivers \U0001f642\U0001f680 isn't\n\t7"
    found, expected = (
        each(text, add_special_tokens=False)["input_ids"] for each in (rebuilt_tokenizer(path), tokenizer)
    )
    assert found == expected
    loaded = load_gguf(path).state_dict()
    for name, weight in model.state_dict().items():
        assert loaded[name].dtype == torch.bfloat16
        torch.testing.assert_close(loaded[name].float(), weight, rtol=1 / 128, atol=1e-5)


@needs_gguf
def test_what_it_takes_is_said_before_it_is_loaded(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    """E4: 2 bytes a number, not the 4 or 8 that a careless reader makes of it."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    said = unpacked_size(write(tmp_path / "tiny.gguf", model, tokenizer))
    assert said.endswith(f" become {2 * numbers / 1000:.4g} kB as bfloat16")


@needs_gguf
@pytest.mark.parametrize(
    ("renamed", "missing", "unexpected"),
    [
        (
            {"blk.1.ffn_up.weight": "blk.1.ffn_upwards.weight"},
            "model.layers.1.mlp.up_proj.weight",
            "blk.1.ffn_upwards.weight",
        ),
        ({"output_norm.weight": "final_norm.weight"}, "model.norm.weight", "final_norm.weight"),
    ],
)
def test_a_renamed_tensor_is_refused_by_both_names(
    tmp_path: Path, model: Any, tokenizer: Any, renamed: dict[str, str], missing: str, unexpected: str
) -> None:
    """E4: transformers would leave it out and draw what is missing at random."""
    path = write(tmp_path / "tiny.gguf", model, tokenizer, renamed)
    with pytest.raises(RequestError, match=rf"^tiny\.gguf: .* missing {missing}, unexpected {unexpected}$"):
        load_gguf(path)


@pytest.mark.parametrize("there", [True, False])
def test_as_a_target_it_is_refused_with_what_to_do(tmp_path: Path, there: bool) -> None:
    """E4: whether the file exists or not, it is never looked for on a hub."""
    path = tmp_path / "Model.Q4_K_M.GGUF"
    if there:
        path.write_bytes(b"GGUF")
    for model in (str(path), path.name, f"owner/{path.name}"):
        with pytest.raises(RequestError, match=r"a GGUF file is not trained for.*name the folder or hub id") as refused:
            locate_target(TargetConfig(model=model))
        assert model in str(refused.value)
