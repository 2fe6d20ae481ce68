"""The target's decoder layers, each compiled by itself.

One graph of the whole model takes ten times as long to compile and is no faster. The compiled part is a layer's
`forward`, not its call: hooks run outside of it, so that what a tap sees is what the layer returned. Compiled code is
kept where torch keeps it (TORCHINDUCTOR_CACHE_DIR, a local folder), for the next process and the next run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from producer.forward import one_batch
from producer.taps import Taps
from producer.target import Target

# Each kind of layer and each dtype, with a mask and without, is a graph of its own.
GRAPHS_A_LAYER = 64
# Batches of one sample and of several are different graphs; lengths are not.
WARM_UP = ((64,), (64, 48))

log = logging.getLogger(__name__)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """From now on these layers run compiled, for any batch and length (dynamic shapes).

    A recurrent layer stays as it is. In plain torch it loops over the length, and each new number of rounds would be
    compiled anew; around its own kernel compiling took longer than its start may take.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_A_LAYER)
    for layer in layers:
        if getattr(layer, "layer_type", None) != "linear_attention":
            layer.forward = torch.compile(layer.forward, dynamic=True)


def compile_and_warm_up(target: Target, taps: Taps) -> None:
    """Compiles the layers up to the last tap, and runs what would otherwise be compiled in the middle of a block."""
    count = max(taps.ids) + 1
    log.info("compiling %d decoder layers, one by one", count)
    started = time.monotonic()
    compile_layers(target.layers[:count])
    for lengths in WARM_UP:
        one_batch(target, taps, [np.arange(length, dtype=np.int32) for length in lengths])
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        log.info("batches of %d: compiled %.1f s after the start", len(lengths), time.monotonic() - started)
