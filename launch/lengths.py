"""Where a token dataset lies, and how long its samples can be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from launch.config import Config
from protocol.dataset import META
from protocol.errors import RequestError


def dataset_folder(config: Config) -> Path:
    """Where the token dataset of this target and data lies; runs that share both share it."""
    key = msgspec.json.encode((config.target.model, config.target.revision, config.data))
    return Path(config.run.dir) / "datasets" / hashlib.blake2b(key, digest_size=8).hexdigest()


def longest_sample(config: Config) -> int:
    """The most tokens of a sample: `data.max_length`, or with "auto" what `prepare` found. Raises RequestError when
    the dataset that would say it is not there yet."""
    if config.data.limit is not None:
        return config.data.limit
    try:
        return int(json.loads((dataset_folder(config) / META).read_text())["max_length"])
    except (OSError, ValueError, KeyError):
        raise RequestError(
            'data.max_length = "auto" is known once the data is prepared: run `draftwire prepare` first'
        ) from None
