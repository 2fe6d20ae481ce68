"""The configurations under examples/ are ones that draftwire takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config import load_config

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted(path: Path) -> None:
    config = load_config(path, ())
    assert config.run.name == path.stem
    assert config.data.eval
