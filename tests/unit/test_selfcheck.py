"""The self-check: what a padded batch may differ in, what it may not, and what is decided from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from producer.checked import FILE_NAME, SelfCheck, TapCheck, padding_mask_of, read_self_check
from producer.compiled import compile_layers
from producer.config import TargetConfig
from producer.selfcheck import self_check, some_samples, statistics
from producer.target import Target, as_target
from protocol.errors import RequestError, RunError

HIDDEN = 32
TAPS = (0, 2)


@pytest.fixture
def target(make_model: Callable[..., Any]) -> Target:
    facts = {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": 400, "model": "tiny"}
    return as_target(make_model("llama"), facts)


@pytest.fixture
def samples() -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 400, length).astype(np.int32) for length in (40, 23, 9, 2)]


def mix_over_time(target: Target, layer: int, heed_mask: bool) -> None:
    """Makes a layer add the mean over all positions, pads included: what no causal decoder does."""

    def add_mean(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        mask = kwargs.get("attention_mask")
        if heed_mask and mask is not None:
            real = (mask[:, 0, -1:, :] == 0).transpose(1, 2) if mask.dtype != torch.bool else mask[:, 0, -1:].mT
            return output + (output * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        return output + output.mean(1, keepdim=True)

    target.layers[layer].register_forward_hook(add_mean, with_kwargs=True)


def test_a_causal_decoder_needs_no_mask(target: Target, samples: Any) -> None:
    padding_mask, checks = self_check(target, TAPS, samples, compiled=False)
    assert not padding_mask
    assert [check.tap for check in checks] == [0, 2]
    for check in checks:
        assert check.sound
        assert check.cosine == pytest.approx(1.0, abs=1e-6)
        assert check.deviation > 0
        assert str(check).startswith(f"tap {check.tap}: mean ")


def test_one_that_sees_its_padding_is_run_with_the_mask(target: Target, samples: Any) -> None:
    mix_over_time(target, 1, heed_mask=True)
    padding_mask, checks = self_check(target, TAPS, samples, compiled=False)
    assert padding_mask
    assert all(check.sound for check in checks)


def test_one_that_sees_it_in_spite_of_the_mask_is_refused_by_the_name_of_its_tap(target: Target, samples: Any) -> None:
    mix_over_time(target, 1, heed_mask=False)
    with pytest.raises(RunError, match=r"self-check: tap 2: .*cosine 0\..* other states in a batch than alone"):
        self_check(target, TAPS, samples, compiled=False)


@pytest.mark.parametrize(("dtype", "sound"), [(torch.bfloat16, True), (torch.float32, False)])
def test_another_rounding_of_the_dtype_is_no_error_where_the_floor_comes_out_at_zero(
    make_model: Callable[..., Any], samples: Any, dtype: torch.dtype, sound: bool
) -> None:
    facts = {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": 400, "model": "tiny"}
    target = as_target(make_model("llama").to(dtype), facts)

    def round_otherwise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if len(output) > 1 and bool((args[0][0] != args[0][1]).any()):  # the rows of the floor are equal
            output[..., ::16] *= 1 + 2**-8  # the next number of bfloat16
        return output

    target.layers[2].register_forward_hook(round_otherwise)
    if sound:
        padding_mask, checks = self_check(target, TAPS, samples, compiled=False)
        assert not padding_mask
        assert checks[1].error > 0
    else:
        with pytest.raises(RunError, match=r"self-check: tap 2: "):
            self_check(target, TAPS, samples, compiled=False)


def test_a_sample_that_is_not_finite_by_itself_is_left_out_and_only_that(target: Target, samples: Any) -> None:
    with torch.no_grad():
        target.embedding.weight[399] = float("nan")  # type: ignore[index, operator]
    clean = [np.minimum(sample, 398) for sample in samples]
    clean[1][3] = 399
    padding_mask, checks = self_check(target, TAPS, clean, compiled=False)
    assert not padding_mask
    assert all(check.sound for check in checks)
    for sample in clean:
        sample[0] = 399
    with pytest.raises(RunError, match="not finite for any of 4 samples"):
        self_check(target, TAPS, clean, compiled=False)


def test_nan_is_never_sound() -> None:
    nan = float("nan")
    good = {"tap": 0, "mean": 0.0, "deviation": 1.0, "zeros": 0.0, "cosine": 1.0, "error": 0.0, "floor": 0.0}
    assert TapCheck(**good).sound
    assert not TapCheck(**good | {"cosine": nan}).sound
    assert not TapCheck(**good | {"error": nan}).sound
    assert not TapCheck(**good | {"error": 2e-3, "floor": 4e-4}).sound
    assert TapCheck(**good | {"error": 2e-3, "floor": 6e-4}).sound


def test_where_rounding_alone_turns_the_states_a_batch_may_do_so_too_but_not_much_more() -> None:
    noisy = {"tap": 31, "mean": 0.0, "deviation": 19.4, "zeros": 0.0, "error": 0.142, "floor": 0.142}
    assert TapCheck(**noisy, cosine=0.9985, floor_cosine=0.9985).sound
    assert not TapCheck(**noisy, cosine=0.993, floor_cosine=0.9985).sound
    assert not TapCheck(**noisy, cosine=0.9985, floor_cosine=0.9991).sound
    assert "(noise floor 1.42e-01, cosine 0.998500)" in str(TapCheck(**noisy, cosine=0.9985, floor_cosine=0.9985))
    assert "(noise floor 1.42e-01)" in str(TapCheck(**noisy, cosine=0.9995, floor_cosine=0.9991))


def test_statistics_of_a_tap() -> None:
    mean, deviation, zeros = statistics(torch.tensor([[0.0, 2.0], [0.0, 2.0]], dtype=torch.bfloat16))
    assert (mean, deviation, zeros) == (1.0, 1.0, 0.5)


def test_samples_are_few_of_different_lengths_longest_first_and_always_the_same() -> None:
    class Dataset:
        lengths = np.array([5, 900, 7, 300, 2, 40, 11])

        def tokens(self, index: int) -> Any:
            return np.full(self.lengths[index], index, np.int32)

    dataset: Any = Dataset()
    assert [len(sample) for sample in some_samples(dataset)] == [512, 300, 11, 7, 2]
    dataset.lengths = np.array([3])
    assert [len(sample) for sample in some_samples(dataset)] == [3]


def test_what_was_decided_is_read_back_and_its_absence_is_told(tmp_path: Any) -> None:
    with pytest.raises(RequestError, match=r"selfcheck.json: no self-check"):
        padding_mask_of(tmp_path)
    (tmp_path / FILE_NAME).write_text('{"fingerprint": "f", "padding_mask": false, "taps": []}')
    assert padding_mask_of(tmp_path) is False
    assert read_self_check(tmp_path) == SelfCheck("f", False, [])
    (tmp_path / FILE_NAME).write_text("{")
    assert read_self_check(tmp_path) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_kernels_of_recurrent_layers_are_left_uncompiled(make_model: Any) -> None:
    """They loop over the length, and their loops would be unrolled anew for each number of rounds."""
    layers = make_model("qwen3_5").model.layers
    names = inspect.unwrap(type(layers[0].linear_attn).forward).__globals__
    compile_layers(layers)
    compile_layers(layers)
    kernels = [name for name, value in names.items() if getattr(value, "_torchdynamo_disable", False)]
    assert any("delta_rule" in name for name in kernels)
    assert all("forward" in vars(layer) for layer in layers)
    # Wrapped once, however often layers are compiled.
    assert not any(hasattr(names[name].__wrapped__, "_torchdynamo_disable") for name in kernels)


@pytest.mark.parametrize(
    ("setting", "on_cpu", "on_gpu"), [("auto", False, True), (True, True, True), (False, False, False)]
)
def test_layers_are_compiled_where_it_pays_unless_told_otherwise(setting: Any, on_cpu: bool, on_gpu: bool) -> None:
    config = TargetConfig(compile=setting)
    assert (config.compiles_on("cpu"), config.compiles_on("cuda:1")) == (on_cpu, on_gpu)


def test_a_divided_target_is_compiled_only_by_request() -> None:
    settings: tuple[Any, ...] = ("auto", True, False)
    found = [TargetConfig(compile=setting, tensor_parallel=2).compiles_on("cuda:0") for setting in settings]
    assert found == [False, True, False]
