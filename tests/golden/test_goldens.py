"""One training step must equal another implementation's in fp32: output, loss and every gradient."""

from pathlib import Path

import pytest

from consumer.golden import recompute
from protocol.errors import RequestError

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", ["full", "sliding", "dpace"])
def test_golden_step(name: str) -> None:
    errors = recompute(FOLDER / f"dflash_{name}.safetensors")
    assert errors.output < 1e-4
    assert errors.loss < 1e-4
    assert errors.grad < 1e-4


def test_a_file_that_is_no_golden_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(RequestError, match=r"x\.safetensors"):
        recompute(tmp_path / "x.safetensors")
