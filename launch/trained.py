"""The drafter that a run starts from: where it lies, and what of its shape the configuration takes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from consumer.inherit import inherit, trained_shape
from consumer.shape import DrafterShape
from launch.config import Config
from producer.locate import from_hub, read_target_facts
from protocol.errors import RequestError

HUB_FILES = ["*.json", "*.safetensors"]


def inherited(
    config: Config, target_dir: Path, checkpoint: Path | None, say: Callable[[str], None]
) -> tuple[Config, DrafterShape | None]:
    """The configuration with the shape of the drafter that it starts from, and that shape; with `checkpoint` of the
    run's own, that one's, for it goes on from there. Says each key that it takes over. Raises RequestError."""
    if config.drafter.init_from is None:
        return config, None
    folder = checkpoint or _located(config.drafter.init_from)
    trained = trained_shape(folder, read_target_facts(target_dir))
    drafter, lines = inherit(config.drafter, trained, str(folder))
    if checkpoint is None:
        drafter = msgspec.structs.replace(drafter, init_from=str(folder))
        for line in lines:
            say(line)
    return msgspec.structs.replace(config, drafter=drafter), trained


def _located(name: str) -> Path:
    """A folder as it is; a hub id "owner/name" from the hub, or from its cache here."""
    if Path(name).is_dir():
        return Path(name)
    key = f"drafter.init_from = {name!r}"
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise RequestError(f"{key}: there is no such folder")
    return from_hub(name, None, HUB_FILES, key)
