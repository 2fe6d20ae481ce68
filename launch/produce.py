"""`draftwire produce`: one producer by hand, for a run on another host.

Everything that can be refused is refused here, before the target is loaded and anything is connected: other weights,
another version. The rest is `producer.remote`'s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from launch.crew import COMPILED_PRODUCTS, INTERRUPTED
from launch.invitation import versions
from launch.machine import visible_gpus
from launch.run import STOPPED_AT_ONCE
from launch.signals import Interrupted, end_at_once
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
    asked = end_at_once()  # nothing here is worth a delay, the run has lost a block at most
    try:
        join = read_join(path)
        _check_versions(path, join, say)
        folder = _find(join, target, say)
        devices = _devices(device, len(visible_gpus()), join.target.tensor_parallel)
        weights = target_fingerprint(folder, join.target, devices[0])
        schema = schema_hash(weights, join.taps, join.dtype, join.width, join.plan_hash)
        # Results depend on the threads. Read when torch is imported, which nothing has done yet.
        os.environ.update({"OMP_NUM_THREADS": str(join.threads)} | COMPILED_PRODUCTS)
        _serve(join, schema, folder, devices, patience_s, say)
    except Interrupted:
        say("interrupted: what this producer was filling is leased anew")
        return STOPPED_AT_ONCE if asked[-1] == signal.SIGINT else INTERRUPTED
    return 0


def _serve(join: Join, schema: str, folder: Path, devices: tuple[str, ...], patience_s: float, say: Say) -> None:
    import torch

    from producer.compiled import compile_and_warm_up
    from producer.ranks import loaded
    from producer.remote import Remote
    from producer.taps import Taps

    say(f"loading the target from {folder} on {' and '.join(devices)}")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        try:
            if devices[0] != "cpu":
                torch.cuda.set_device(devices[0])
            whole = stack.enter_context(loaded(folder, join.target, devices, logs / "produce.log"))
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            raise RequestError(f"--device {','.join(devices)}: the target does not fit: {reason}") from None
        target = replace(whole, padding_mask=join.padding_mask)
        taps = stack.enter_context(Taps(target.layers, join.taps))
        if join.target.compiles_on(devices[0]):
            say("compiling the decoder layers")
            compile_and_warm_up(target, taps)
        Remote(join, schema, target, taps, say).serve(patience_s)


def _devices(asked: str | None, gpus: int, count: int) -> tuple[str, ...]:
    """As many as target.tensor_parallel of the run; the first ones unless told otherwise."""
    there = [f"cuda:{index}" for index in range(gpus)]
    devices = asked.split(",") if asked is not None else there[:count] or ["cpu"] * count
    if len(devices) != count:
        raise RequestError(
            f"--device {','.join(devices)}: the run has target.tensor_parallel = {count}: name {count} devices, with "
            f"commas between them; {gpus} GPUs are visible on this host"
        )
    if set(devices) != {"cpu"} and (not set(devices) <= set(there) or len(set(devices)) < count):
        raise RequestError(f"--device {asked}: write cpu or cuda:INDEX; {gpus} GPUs are visible on this host")
    return tuple(devices)


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
