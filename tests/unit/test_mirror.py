"""What ranks are told to run, and that a rank which is told runs the same as the one that tells."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.config import TargetConfig
from producer.decoding import Sampling
from producer.follower import follow
from producer.forward import features_into
from producer.generate import greedy_answers
from producer.mirror import Answers, Command, Compile, Pass, Whole, commands, encode
from producer.taps import Taps
from producer.target import Target, load_target
from protocol.errors import RunError

numbers = st.integers(0, 2**31)
told = st.one_of(
    st.builds(Pass, numbers, st.binary(), st.none() | st.binary(), st.none() | numbers),
    st.builds(
        Answers,
        numbers,
        st.binary(),
        st.binary(),
        st.tuples(numbers, numbers),
        numbers,
        st.builds(Sampling, temperature=st.floats(0, 2), top_k=numbers),
        st.tuples(numbers),
    ),
    st.builds(Whole, st.text()),
    st.builds(Compile, numbers),
)


class Kept:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.frames = b""

    def tell(self, command: Command) -> None:
        self.frames += encode(command)


@pytest.fixture
def target(make_folder: Callable[..., Path]) -> Target:
    return load_target(make_folder("qwen3"), TargetConfig(dtype="float32"), "cpu")


@settings(max_examples=50)
@given(st.lists(told, max_size=4), st.integers(0, 40))
def test_commands_come_back_in_order_and_a_torn_one_is_the_end(sent: list[Command], torn: int) -> None:
    frames = b"".join(map(encode, sent))
    assert list(commands(io.BytesIO(frames))) == sent
    found = list(commands(io.BytesIO(frames[: max(len(frames) - torn, 0)])))
    assert found == sent[: len(found)]
    assert torn == 0 or not sent or len(found) < len(sent)


def watched(target: Target, seen: list[tuple[int, torch.Tensor]]) -> list[Any]:
    """Hooks that note which layers see what."""
    return [
        layer.register_forward_hook(lambda _module, _inputs, output, at=at: seen.append((at, output.clone())))
        for at, layer in enumerate(target.layers)
    ]


def test_who_is_told_runs_the_same_layers_on_the_same_tokens(target: Target) -> None:
    kept, mine, theirs = Kept(), [], []
    samples = [np.arange(length, dtype=np.int32) for length in (9, 8, 3)]
    handles = watched(target, mine)
    with Taps(target.layers, [1, 0]) as taps:
        out = torch.empty((20, 64))
        features_into(out, replace(target, mirror=kept), taps, samples)
    sampling = Sampling(temperature=1.5)
    answers = greedy_answers(
        replace(target, mirror=kept),
        samples,
        max_new_tokens=3,
        stop_ids=frozenset({7}),
        sampling=sampling,
        seeds=(1, 2, 3),
    )
    for handle in handles:
        handle.remove()
    handles = watched(target, theirs)
    follow(target, commands(io.BytesIO(kept.frames)))
    for handle in handles:
        handle.remove()
    assert len(answers) == 3
    assert [at for at, _ in mine[:4]] == [0, 1, 0, 1]  # two batches, each up to the last tap
    assert [at for at, _ in theirs] == [at for at, _ in mine]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(mine, theirs, strict=True))


def test_a_divided_target_never_halves_a_batch(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are in the middle of the pass: only an end of all of them gets them out."""
    kept = Kept()

    def short_of_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target.text, "forward", short_of_memory)
    samples = [np.arange(8, dtype=np.int32)] * 4
    with Taps(target.layers, [1]) as taps:
        with pytest.raises(RunError, match=r"4 x 8 tokens.*lower train.microbatch_tokens.*CUDA out of memory"):
            features_into(torch.empty((32, 32)), replace(target, mirror=kept), taps, samples)
        assert len(list(commands(io.BytesIO(kept.frames)))) == 1
        with pytest.raises(torch.OutOfMemoryError):
            features_into(torch.empty((32, 32)), target, taps, samples)


def test_a_tap_that_is_only_a_part_of_a_layer_s_output_is_an_error(target: Target) -> None:
    target.layers[1].register_forward_hook(lambda module, inputs, output: output[..., :16])
    with Taps(target.layers, [0, 1]) as taps, pytest.raises(RunError, match=r"tap 1: .* is 16 wide, not 32"):
        features_into(torch.empty((8, 64)), target, taps, [np.arange(8, dtype=np.int32)])
