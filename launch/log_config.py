"""The [log] section: where else the rows of metrics.jsonl go."""

from __future__ import annotations

import importlib.util

import msgspec

from protocol.errors import RequestError


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[log]: curves in TensorBoard's format under the run's folder, and a project of Weights & Biases."""

    tensorboard: bool = False
    wandb: str | None = None


def check_log(config: LogConfig) -> None:
    """Raises RequestError for an empty project."""
    if config.wandb is not None and not config.wandb.strip():
        raise RequestError("log.wandb is empty: write the name of a project, or leave it out")


def check_installed(config: LogConfig) -> None:
    """Raises RequestError for a logger whose package is not installed here."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    for name, on in wanted.items():
        if on and importlib.util.find_spec(name) is None:
            raise RequestError(
                f"log.{name} needs the package {name}: pip install 'draftwire[{name}]', or remove the key"
            )
