"""What lies on disk has every bit: target ends and evaluation features of each dtype, special value and edge shape."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from consumer.acceptance import load_eval_rows
from consumer.target_ends import read_target_ends
from producer import target_io
from producer.forward import features_of
from producer.target_io import save_atomically, write_target_io

# Quiet and signalling NaNs with payloads, -0, infinity, the largest finite value, the least denormal, 1.
WORDS = {
    torch.bfloat16: np.array([0x7FC1, 0xFFA5, 0x7F81, 0x8000, 0xFF80, 0x7F7F, 0x0001, 0x3F80], np.uint16),
    torch.float16: np.array([0x7E01, 0xFE55, 0x7C01, 0x8000, 0xFC00, 0x7BFF, 0x0001, 0x3C00], np.uint16),
    torch.float32: np.array(
        [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0xFF800000, 0x7F7FFFFF, 1, 0x3F800000], np.uint32
    ),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(WORDS[dtype].copy()).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4), (0, 4)], ids=str)
def test_target_ends_come_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """B7: on disk, also when the model holds its head transposed."""
    monkeypatch.setattr(target_io, "embedding_scale", lambda target, embedding: 1.0)
    embedding = values(dtype)[: shape[0] * shape[1]].reshape(shape)
    head = embedding.flip(0, 1).t().contiguous().t()
    assert head.is_contiguous() == (min(shape) < 2)
    ends: Any = {"embedding": SimpleNamespace(weight=embedding), "head": SimpleNamespace(weight=head)}
    target: Any = SimpleNamespace(**ends, facts={"model": "m"}, dtype=dtype)
    write_target_io(tmp_path / "io.safetensors", target, "f")
    found = read_target_ends(tmp_path / "io.safetensors", torch.device("cpu"))
    for arrived, sent in ((found.embedding, embedding), (found.head, head)):
        assert (arrived.dtype, arrived.shape) == (dtype, sent.shape)
        assert bits(arrived) == bits(sent)
    assert found.config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_evaluation_features_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    """B7: the way that `write_eval_shard` saves and a consumer reads."""
    features = values(dtype)[: 2 * tokens].reshape(tokens, 2)
    tensors = {
        "token_ids": torch.arange(tokens, dtype=torch.int32),
        "offsets": torch.tensor([0, tokens]),
        "prompt_lengths": torch.tensor([2**31 - 1], dtype=torch.int32),
        "features": features,
    }
    metadata = {"taps": json.dumps([1]), "max_new_tokens": "4"}
    save_atomically(tmp_path / "eval.safetensors", tensors, metadata)
    rows = load_eval_rows(tmp_path / "eval.safetensors")
    assert (rows.features.dtype, rows.features.shape) == (dtype, (tokens, 2))
    assert bits(rows.features) == bits(features)
    assert rows.answers.prompt_lengths.tolist() == [2**31 - 1]


def test_a_transposed_tensor_is_refused_rather_than_stored_in_the_wrong_order(tmp_path: Path) -> None:
    """B7: who saves makes it contiguous first; nothing half-written stays."""
    with pytest.raises(ValueError, match="contiguous"):
        save_atomically(tmp_path / "x.safetensors", {"x": torch.arange(6.0).reshape(2, 3).t()}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What safetensors says of it has no number that a caller could look at."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("producer.target_io.save_file", refuse)
    with pytest.raises(OSError, match=r"x\.safetensors") as full:
        save_atomically(tmp_path / "x.safetensors", {}, {})
    assert full.value.errno == errno.ENOSPC


def test_a_features_buffer_that_is_a_slice_is_refused() -> None:
    """B7: a tap is never written through a buffer whose rows do not lie side by side."""
    ids = [np.arange(8, dtype=np.int32)]
    for sliced in (np.zeros((8, 4), np.uint16)[:, :2], np.zeros((4, 8), np.uint16).T):
        nothing: Any = None
        with pytest.raises(ValueError, match="contiguous"):
            features_of(nothing, nothing, ids, sliced)
