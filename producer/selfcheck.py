"""The self-check of a loaded target: samples in one padded batch against each alone, tap by tap.

Two implementations of one model, or one at two batch shapes, differ by rounding. How much is measured, not assumed: the
longest sample repeated to the batch's size, without padding, against itself alone is the noise floor, but never less
than a part of the dtype's own step. What is compared with it are the mean cosine and the 99th percentile of the error,
never the single worst value: a mixture of experts flips an expert now and then, and rightly so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from producer.checked import TapCheck
from producer.compiled import compile_target
from producer.forward import one_batch
from producer.taps import Taps
from producer.target import Target
from protocol.dataset import TokenDataset
from protocol.errors import RunError

PERCENTILE = 99.0
# Of the dataset: enough lengths for real padding, few enough tokens for a slow CPU.
SAMPLES = 5
LONGEST = 512
# The floor in steps of the dtype at 1, at least: where both ways happen to round alike it would come out as zero, and
# one other rounding of a bfloat16 state be taken for an error. FLOOR_FACTOR times this is one step.
LEAST_STEPS = 0.25

Samples = Sequence[NDArray[np.int32]]


def self_check(target: Target, tap_ids: Sequence[int], samples: Samples, compiled: bool) -> tuple[bool, list[TapCheck]]:
    """(whether batches need their padding mask, the figures of the way that is taken).

    The reference is eager and alone; with `compiled` the layers are compiled before batches are compared with it, and
    stay so. A sample that is not finite alone says nothing of batches, and will be quarantined. Raises RunError when
    all are like that, and, naming the tap, when a batch with its mask still differs.
    """
    with Taps(target.layers, tap_ids) as taps:
        by_itself = [one_batch(target, taps, [sample]) for sample in samples]
        finite = [bool(features.isfinite().all()) for features in by_itself]
        if not any(finite):
            raise RunError(
                f"self-check: the target's states are not finite for any of {len(samples)} samples: its weights or its "
                "dtype are wrong here (float16 overflows where bfloat16 does not: target.dtype)"
            )
        samples = [sample for sample, good in zip(samples, finite, strict=True) if good]
        alone = torch.cat([features for features, good in zip(by_itself, finite, strict=True) if good])
        if compiled:
            compile_target(target, max(tap_ids) + 1)
        without = compare(replace(target, padding_mask=False), taps, alone, samples)
        if all(check.sound for check in without):
            return False, without
        checks = compare(replace(target, padding_mask=True), taps, alone, samples)
    for check in checks:
        if not check.sound:
            raise RunError(
                f'self-check: {check}: the target computes other states in a batch than alone; target.attn = "eager", '
                'target.compile = false or target.dtype = "float32" may help'
            )
    return True, checks


def compare(target: Target, taps: Taps, alone: torch.Tensor, samples: Samples) -> list[TapCheck]:
    """A batch of `samples`, longest first, against `alone` `[sum L_i, taps * H]`, the same samples one by one."""
    together = one_batch(target, taps, samples)
    longest = len(samples[0])
    repeated = one_batch(target, taps, [samples[0]] * len(samples))[:longest]
    hidden = alone.shape[1] // len(taps.ids)
    checks = []
    for place, tap in enumerate(taps.ids):
        columns = slice(place * hidden, (place + 1) * hidden)
        expected, found = alone[:, columns].float(), together[:, columns].float()
        scale = max(float(expected.square().mean().sqrt()), 1e-30)
        noisy = repeated[:, columns].float()
        floor = max(_error(noisy - expected[:longest], scale), torch.finfo(alone.dtype).eps * LEAST_STEPS)
        cosine, floor_cosine = _cosine(found, expected), _cosine(noisy, expected[:longest])
        error = _error(found - expected, scale)
        checks.append(TapCheck(tap, *statistics(alone[:, columns]), cosine, error, floor, floor_cosine))
    return checks


def statistics(features: torch.Tensor) -> tuple[float, float, float]:
    """(mean, standard deviation, share of zeros) of features of any shape."""
    values = features.float()
    return float(values.mean()), float(values.std(correction=0)), float((features == 0).float().mean())


def some_samples(dataset: TokenDataset) -> list[NDArray[np.int32]]:
    """A few samples of different lengths, longest first, cut at LONGEST tokens: the same ones each time."""
    order = np.argsort(-dataset.lengths, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, SAMPLES).astype(int))
    return [dataset.tokens(int(order[place]))[:LONGEST] for place in places]


def _cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found, expected, dim=-1).mean())


def _error(difference: torch.Tensor, scale: float) -> float:
    return float(np.percentile(difference.abs().cpu().numpy(), PERCENTILE)) / scale
