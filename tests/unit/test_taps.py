"""Taps and block features: cases E2, E3 and E5 of the public failure reports."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from producer.config import SourceConfig, TargetConfig
from producer.forward import features_of
from producer.padding import batches, launch_bound_tokens
from producer.samples import Item, SampleMaker
from producer.taps import Taps
from producer.target import Target, as_target, load_target, run_text
from producer.template import load_tokenizer
from protocol.errors import RequestError, RunError

HIDDEN = 32
LENGTHS = (45, 48, 41)  # alike enough to share a pass


@pytest.fixture(params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Target:
    return wrapped(make_model(request.param))


def wrapped(model: Any) -> Target:
    return as_target(model, {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": 400, "model": "tiny"})


def samples_of(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 400, length).astype(np.int32) for length in lengths]


def features(target: Target, taps: Taps, samples: list[Any], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    out = np.full((sum(map(len, samples)), len(taps.ids) * HIDDEN), 77, dtype=dtype)
    assert features_of(target, taps, samples, out) == 0
    return out


@pytest.mark.parametrize("batch", [1, 2])
def test_tap_is_the_output_of_its_layer(target: Target, batch: int) -> None:
    """E2: one row a token, as wide as the layer, whatever the batch."""
    samples = samples_of([9] * batch)
    ids = torch.from_numpy(np.stack(samples)).long()
    with torch.inference_mode():
        states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    with Taps(target.layers, [2, 0, 1]) as taps:
        got = features(target, taps, samples)
    for place, tap in enumerate(taps.ids):
        expected = states[tap + 1].reshape(-1, HIDDEN).numpy()
        np.testing.assert_array_equal(got[:, place * HIDDEN : (place + 1) * HIDDEN], expected)


def test_last_layer_is_taken_before_the_final_norm(target: Target) -> None:
    samples = samples_of([5])
    with Taps(target.layers, [3]) as taps:
        got = torch.from_numpy(features(target, taps, samples))
    states = target.model(input_ids=torch.from_numpy(samples[0])[None].long(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.model.model.norm(got), states[-1][0])
    assert not torch.allclose(got, states[-1][0], rtol=1e-2)


def test_batched_equals_alone_and_padding_never_enters(target: Target) -> None:
    samples = samples_of(LENGTHS)
    with Taps(target.layers, [0, 3]) as taps:
        together = features(target, taps, samples)
        alone = np.concatenate([features(target, taps, [sample]) for sample in samples])
    assert together.shape == (sum(LENGTHS), 2 * HIDDEN)
    np.testing.assert_allclose(together, alone, atol=1e-4, rtol=0)


def test_features_are_the_same_bits_every_time(target: Target) -> None:
    samples = samples_of(LENGTHS)
    with Taps(target.layers, [1, 2]) as taps:
        first, second = features(target, taps, samples), features(target, taps, samples)
    assert first.tobytes() == second.tobytes()


def test_bfloat16_travels_as_words(make_model: Callable[..., Any]) -> None:
    target = wrapped(make_model("qwen3").to(torch.bfloat16))
    samples = samples_of(LENGTHS)
    with Taps(target.layers, [0, 3]) as taps:
        words = features(target, taps, samples, np.uint16)
        alone = np.concatenate([features(target, taps, [sample], np.uint16) for sample in samples])
    one, other = (torch.from_numpy(part).view(torch.bfloat16).float() for part in (words, alone))
    assert torch.isfinite(one).all()
    assert torch.nn.functional.cosine_similarity(one, other).mean() > 0.999


def test_buffer_of_another_size_is_refused(target: Target) -> None:
    with Taps(target.layers, [0]) as taps, pytest.raises(ValueError, match="does not fit"):
        features_of(target, taps, samples_of([3, 4]), np.zeros((8, HIDDEN), np.float32))


@pytest.mark.parametrize("ids", [[], [4], [-1], [1, 1]])
def test_wrong_taps_are_refused(target: Target, ids: list[int]) -> None:
    with pytest.raises(RequestError, match=r"drafter\.taps.*layers 0 to 3"):
        Taps(target.layers, ids)


def test_layer_that_runs_twice_or_never_is_named(target: Target) -> None:
    """E2: as many are captured in a forward pass as were asked for, or the run stops."""
    rows, out = torch.arange(3), torch.empty(3, 2 * HIDDEN)
    with Taps(target.layers, [2, 3]) as taps:
        with (
            pytest.raises(RunError, match=r"tap 2: .* captured 0 times"),
            taps.capture(rows, out, torch.arange(len(rows))),
        ):
            pass
        twice = torch.nn.Sequential(target.layers[2], target.layers[2])
        target.layers[2].forward = lambda hidden, *args, **kwargs: hidden  # type: ignore[method-assign]
        with (
            pytest.raises(RunError, match=r"tap 2: .* captured 2 times"),
            taps.capture(rows, out, torch.arange(len(rows))),
        ):
            twice(torch.zeros(1, 3, HIDDEN))


def test_tuple_outputs_are_understood(target: Target) -> None:
    """E2: item 0 of a tuple is the state; item 0 of a tensor would be the first sample."""
    samples = samples_of([6, 2])
    with Taps(target.layers, [1]) as taps:
        plain = features(target, taps, samples)
    for layer in target.layers:
        forward = layer.forward
        layer.forward = lambda *args, _forward=forward, **kwargs: (_forward(*args, **kwargs),)  # type: ignore[method-assign]
    # The tap sees the tuple; a hook behind it unpacks it for the layers that follow.
    with Taps(target.layers, [1]) as taps:
        handles = [layer.register_forward_hook(lambda module, inputs, output: output[0]) for layer in target.layers]
        np.testing.assert_array_equal(features(target, taps, samples), plain)
    for handle in handles:
        handle.remove()


def test_hooks_are_gone_after_close_and_nothing_is_kept(target: Target) -> None:
    """E2: as many tensors after 300 batches as after 30, and as many bytes; no gradient graph."""

    def tensors() -> tuple[int, int]:
        gc.collect()
        found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        # Compiling leaves some without memory behind, whose sizes are symbols.
        held = [thing for thing in found if thing.device.type != "meta"]
        return len(held), sum(thing.nbytes for thing in held)

    samples = samples_of([5, 3])
    with Taps(target.layers, [0, 2]) as taps:
        for batch in range(300):
            got = features(target, taps, samples)
            if batch == 30:
                before = tensors()
        assert tensors() == before
        assert not torch.from_numpy(got).requires_grad
    assert not any(layer._forward_hooks for layer in target.layers)


def test_the_pass_ends_at_the_last_tap(target: Target) -> None:
    ran: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs, place=place: ran.append(place))
        for place, layer in enumerate(target.layers)
    ]
    with Taps(target.layers, [0, 2]) as taps:
        features(target, taps, samples_of([5, 3]))
    assert sorted(set(ran)) == [0, 1, 2]
    for handle in handles:
        handle.remove()


def test_batches_hold_similar_lengths_and_every_sample_once() -> None:
    lengths = [50, 800, 60, 700, 790, 55, 1]
    groups = batches(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        assert min(lengths[place] for place in group) >= 0.85 * lengths[group[0]]
    assert groups[0] == [1, 4, 3]


def test_padding_that_costs_nothing_is_not_avoided() -> None:
    lengths = [50, 800, 60, 700, 790, 55, 1]
    assert batches(lengths, 7 * 800) == [[1, 4, 3, 2, 5, 0, 6]]
    assert batches(lengths, 4 * 800) == [[1, 4, 3, 2], [5, 0, 6]]


def test_a_small_target_is_bound_by_launches_for_longer() -> None:
    small = {
        "hidden_size": 576,
        "head_dim": 64,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    }
    large = {
        "hidden_size": 4096,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    }
    assert 20_000 < launch_bound_tokens(small) < 40_000
    assert launch_bound_tokens(large) < 1000


def test_the_padding_side_of_the_tokenizer_makes_no_difference(
    make_folder: Callable[..., Path], make_chats: Callable[..., Path]
) -> None:
    """E3: batches are padded by their lengths, not by the tokenizer."""
    folder = make_folder()
    source = SourceConfig(path=str(make_chats(4)))
    found = []
    for side in ("left", "right"):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": side}))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.padding_side == side
        maker, target = SampleMaker(tokenizer, 400, 64), load_target(folder, TargetConfig(dtype="float32"), "cpu")
        samples = [maker.sample(item).ids for item in maker.items([source]) if isinstance(item, Item)]
        assert len(samples) == 4
        with Taps(target.layers, [0, 3]) as taps:
            found.append((samples, features(target, taps, samples).tobytes()))
    assert [sample.tolist() for sample in found[0][0]] == [sample.tolist() for sample in found[1][0]]
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("length", [64, 128, 224])
def test_the_longest_sample_by_far_gives_one_row_a_token(target: Target, length: int) -> None:
    """E5: no input is cut into chunks. Rows of a sample's beginning do not depend on how long it goes on."""
    (long,) = samples_of([length])
    others = samples_of([5, 64], seed=1)
    with Taps(target.layers, [0, 3]) as taps:
        alone = features(target, taps, [long])
        together = features(target, taps, [others[0], long, others[1]])
        assert alone.shape == (length, 2 * HIDDEN)
        assert len(together) == length + 5 + 64
        np.testing.assert_allclose(together[5 : 5 + length], alone, rtol=0, atol=1e-4)
        for border in (1, 63, 64):
            beginning = features(target, taps, [long[:border]])
            np.testing.assert_allclose(alone[:border], beginning, rtol=0, atol=1e-4)


def test_a_batch_that_does_not_fit_is_halved_down_to_one_sample(target: Target, monkeypatch: Any) -> None:
    """E5, N6: a batch is cut between samples, never inside of one."""
    samples = samples_of([8, 8, 8, 8, 8])
    with Taps(target.layers, [1]) as taps:
        whole = features(target, taps, samples)
        largest, sizes = [1], []

        def short_of_memory(target: Target, ids: Any, mask: Any, last: int) -> None:
            if len(ids) > largest[0]:
                raise torch.OutOfMemoryError
            sizes.append(len(ids))
            run_text(target, ids, mask, last)

        monkeypatch.setattr("producer.forward.run_text", short_of_memory)
        out = np.zeros_like(whole)
        assert features_of(target, taps, samples, out) == 4
        np.testing.assert_allclose(out, whole, rtol=0, atol=1e-5)
        assert sizes == [1] * 5  # one row a token, each sample in one pass
        largest[0] = 0
        with pytest.raises(torch.OutOfMemoryError):
            features_of(target, taps, samples, out)
