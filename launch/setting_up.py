"""What is made before anybody produces or trains, each by a process of its own that ends with it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from launch.config import Config
from launch.live import Screen
from launch.machine import processors
from launch.signals import Interrupted, Signals
from launch.start import Outline, dataset_folder, plan_params
from producer.setup_args import PrepareArgs, Resumed, SetupArgs
from protocol.child import ERROR_PREFIX
from protocol.dataset import TokenDataset
from protocol.errors import RequestError, RunError
from protocol.supervise import Child

TICK_S = 0.1


def set_up(
    config: Config,
    found: Outline,
    checkpoint: Path | None,
    run_dir: Path,
    signals: Signals,
    screen: Screen,
    cache: Path | None = None,
    cached_only: bool = False,
) -> TokenDataset:
    """Token dataset, target_io and eval shard, made by a process of its own that loads the target if it must. `cache`:
    the folder where what needs the target is kept; with `cached_only` it must come from there."""
    resumed = Resumed(checkpoint=str(checkpoint), plan=plan_params(config, found)) if checkpoint is not None else None
    folder = dataset_folder(config)
    args = SetupArgs(
        target_dir=str(found.target_dir),
        target=config.target,
        data=config.data,
        run_dir=str(run_dir),
        dataset_dir=str(folder),
        taps=found.shape.target_layer_ids,
        eval_prompts=config.eval.prompts,
        eval_max_new_tokens=config.eval.max_new_tokens,
        devices=found.placement.by_producer[0],
        resumed=resumed,
        init_layers=config.drafter.layers if config.drafter.init == "target" else 0,
        cache_dir=str(cache) if cache is not None else None,
        cached_only=cached_only,
    )
    write_json(run_dir / "setup.json", msgspec.to_builtins(args))
    ranks = found.placement.tensor_parallel
    one_off("setup", "producer.setup", [str(run_dir / "setup.json")], run_dir, signals, screen, ranks)
    return TokenDataset.open(folder)


def prepare_alone(config: Config, target_dir: Path, run_dir: Path, signals: Signals, screen: Screen) -> TokenDataset:
    """The token dataset alone, where its samples decide what the rest needs."""
    folder = dataset_folder(config)
    args = PrepareArgs(target_dir=str(target_dir), target=config.target, data=config.data, dataset_dir=str(folder))
    write_json(run_dir / "prepare.json", msgspec.to_builtins(args))
    one_off("prepare", "producer.prepare_alone", [str(run_dir / "prepare.json")], run_dir, signals, screen)
    return TokenDataset.open(folder)


def one_off(
    name: str, module: str, arguments: list[str], run_dir: Path, signals: Signals, screen: Screen, ranks: int = 1
) -> None:
    """Runs a child to its end and passes its lines on, or says that it still works; raises what it ended with. `ranks`:
    how many processes it will be."""
    started_s, doing = time.monotonic(), f"starts {name}"
    log_path = run_dir / "log" / f"{name}.log"
    start_bytes = log_path.stat().st_size if log_path.exists() else 0
    # Alone on the machine, it may use every core.
    child = Child(name, module, arguments, log_path, {"OMP_NUM_THREADS": str(max(processors() // ranks, 1))})
    with log_path.open(encoding="utf-8", errors="replace") as log:
        log.seek(start_bytes)
        code = None
        while code is None:
            code = child.wait(TICK_S)
            for line in log:
                if not line.startswith(ERROR_PREFIX):
                    doing = line.rstrip()
                    screen.say(doing)
            screen.still(doing, started_s)
            if signals.wishes:
                child.end(grace_s=1.0)
                raise Interrupted
    if code == 2:
        raise RequestError(child.last_error())
    if code != 0:
        raise RunError(child.obituary())


def write_json(path: Path, data: object) -> None:
    """Replaces a file in one step."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    part.rename(path)
