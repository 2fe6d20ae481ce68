"""`draftwire produce`: one producer by hand, for a run on another host.

Everything that can be refused is refused here, before the target is loaded and anything is connected: other weights,
another version. The rest is `producer.remote`'s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from launch.crew import COMPILED_PRODUCTS, INTERRUPTED
from launch.invitation import versions
from launch.machine import visible_gpus
from launch.run import STOPPED_AT_ONCE
from launch.signals import Interrupted
from producer.join import Join, read_join
from producer.locate import locate_target, read_target_facts, target_fingerprint, weights_fingerprint
from protocol.errors import RequestError
from protocol.job import schema_hash
from protocol.version import PROTOCOL_VERSION

Say = Callable[[str], None]


def produce(path: Path, target: str | None, device: str | None, patience_s: float, say: Say) -> int:
    """Serves the run that wrote the join.json at `path` until it ends; returns the exit code.

    `target` replaces the place of the model that the file names. Raises RequestError when this host has something else
    than the run, RunError when the run refuses or is out of reach for `patience_s`.
    """
    asked: list[int] = []
    _listen_to_signals(asked)
    try:
        join = read_join(path)
        _check_versions(path, join, say)
        folder = _find(join, target, say)
        device = _device(device, len(visible_gpus()))
        weights = target_fingerprint(folder, join.target, device)
        schema = schema_hash(weights, join.taps, join.dtype, join.width, join.plan_hash)
        # Results depend on the threads. Read when torch is imported, which nothing has done yet.
        os.environ.update({"OMP_NUM_THREADS": str(join.threads)} | COMPILED_PRODUCTS)
        _serve(join, schema, folder, device, patience_s, say)
    except Interrupted:
        say("interrupted: what this producer was filling is leased anew")
        return STOPPED_AT_ONCE if asked[-1] == signal.SIGINT else INTERRUPTED
    return 0


def _serve(join: Join, schema: str, folder: Path, device: str, patience_s: float, say: Say) -> None:
    import torch

    from producer.compiled import compile_and_warm_up
    from producer.remote import Remote
    from producer.taps import Taps
    from producer.target import load_target

    say(f"loading the target from {folder} on {device}")
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        target = replace(load_target(folder, join.target, device), padding_mask=join.padding_mask)
    except torch.OutOfMemoryError as error:
        raise RequestError(f"--device {device}: the target does not fit: {str(error).splitlines()[0]}") from None
    with Taps(target.layers, join.taps) as taps:
        if join.target.compiles_on(device):
            say("compiling the decoder layers")
            compile_and_warm_up(target, taps)
        Remote(join, schema, target, taps, say).serve(patience_s)


def _device(asked: str | None, gpus: int) -> str:
    if asked is None:
        return "cuda:0" if gpus else "cpu"
    if asked != "cpu" and asked not in [f"cuda:{index}" for index in range(gpus)]:
        raise RequestError(f"--device {asked}: write cpu or cuda:INDEX; {gpus} GPUs are visible on this host")
    return asked


def _find(join: Join, target: str | None, say: Say) -> Path:
    """The local folder with the very weights of the run."""
    named = join.target if target is None else msgspec.structs.replace(join.target, model=target, revision=None)
    try:
        folder = locate_target(named, say)
    except RequestError as error:
        if target is not None:
            raise
        raise RequestError(f"{error}; --target FOLDER says where the target lies on this host") from None
    if weights_fingerprint(folder) != join.weights:
        name = read_target_facts(folder)["model"]
        raise RequestError(
            f"{folder}: these are not the weights of run {join.run}, whose target is {join.target.model}: config.json "
            f"or the safetensors files of {name} differ; copy the folder, or name another one with --target"
        )
    return folder


def _check_versions(path: Path, join: Join, say: Say) -> None:
    if join.protocol != PROTOCOL_VERSION:
        raise RequestError(
            f"{path}: the run speaks protocol version {join.protocol} (draftwire {join.versions.get('draftwire')}), "
            f"this host {PROTOCOL_VERSION}: install the same draftwire on both"
        )
    for name, here in versions().items():
        if (there := join.versions.get(name)) != here:
            say(f"note: the run has {name} {there}, this host {here}; their features may round differently")


def _listen_to_signals(asked: list[int]) -> None:
    """INT, TERM, HUP and USR1 end it at once: nothing here is worth a delay, the run has lost a block at most."""

    def end(number: int, _frame: object) -> None:
        asked.append(number)
        raise Interrupted

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, end)
