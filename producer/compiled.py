"""The target's decoder layers, each compiled by itself.

One graph of the whole model takes ten times as long to compile and is no faster. The compiled part is a layer's
`forward`, not its call: hooks run outside of it, so that what a tap sees is what the layer returned. Compiled code is
kept where torch keeps it (TORCHINDUCTOR_CACHE_DIR, a local folder), for the next process and the next run.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterable
from types import FunctionType

import numpy as np
import torch
from torch import nn

from producer.forward import one_batch
from producer.mirror import Compile
from producer.taps import Taps
from producer.target import Target

# Each kind of layer and each dtype, with a mask and without, is a graph of its own.
GRAPHS_A_LAYER = 64
# Batches of one sample and of several are different graphs; lengths are not.
WARM_UP = ((64,), (64, 48))

log = logging.getLogger(__name__)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """From now on these layers run compiled, for any batch and length (dynamic shapes).

    Kernels of recurrent layers, or what stands in for them, stay as they are, and what lies between them is compiled:
    in plain torch such a kernel loops over the length, and each new number of rounds would be compiled anew.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_A_LAYER)
    for layer in layers:
        for module in layer.modules():
            _leave_kernels_alone(module)
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _leave_kernels_alone(module: nn.Module) -> None:
    """Keeps the compiler out of the functions that transformers may replace by kernels: those that it wraps, among the
    names that `module.forward` uses."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(forward, "__globals__", {})
    for name in forward.__code__.co_names:
        function = names.get(name)
        replaceable = isinstance(function, FunctionType) and hasattr(function, "__wrapped__")
        if replaceable and not getattr(function, "_torchdynamo_disable", False):
            names[name] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def compile_target(target: Target, count: int) -> None:
    """`compile_layers` for the first `count` layers, on every rank of a divided target."""
    target.mirror.tell(Compile(count))
    compile_layers(target.layers[:count])


def compile_and_warm_up(target: Target, taps: Taps) -> None:
    """Compiles the layers up to the last tap, and runs what would otherwise be compiled in the middle of a block."""
    count = max(taps.ids) + 1
    log.info("compiling %d decoder layers, one by one", count)
    started = time.monotonic()
    compile_target(target, count)
    for lengths in WARM_UP:
        one_batch(target, taps, [np.arange(length, dtype=np.int32) for length in lengths])
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        log.info("batches of %d: compiled %.1f s after the start", len(lengths), time.monotonic() - started)
