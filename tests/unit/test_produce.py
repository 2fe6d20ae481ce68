"""`draftwire produce` before it connects: another host must have the run's weights, version and a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.invitation import versions
from launch.produce import _check_versions, _devices, _find
from producer.config import TargetConfig
from producer.join import Join
from producer.locate import target_fingerprint, weights_fingerprint
from protocol.errors import RequestError
from protocol.job import schema_hash
from protocol.version import PROTOCOL_VERSION


def joining(folder: Path, **changes: Any) -> Join:
    fields: dict[str, Any] = {
        "run": "far",
        "run_id": "far-1",
        "protocol": PROTOCOL_VERSION,
        "address": "tcp://127.0.0.1:1",
        "payload_address": "tcp://127.0.0.1:2",
        "token": "t",
        "server_key": "",
        "target": TargetConfig(model=str(folder), dtype="float32"),
        "weights": weights_fingerprint(folder),
        "taps": (0, 1),
        "width": 64,
        "dtype": "float32",
        "padding_mask": True,
        "plan_hash": "p",
        "threads": 1,
        "versions": versions(),
    }
    return Join(**fields | changes)


def test_the_same_weights_in_another_folder_are_the_run_s(make_folder: Callable[..., Path]) -> None:
    first, second = make_folder("llama"), make_folder("llama", "copy")
    said: list[str] = []
    join = joining(first)
    assert _find(join, None, said.append) == first
    assert _find(join, str(second), said.append) == second
    one, other = (
        schema_hash(target_fingerprint(folder, join.target, "cpu"), join.taps, join.dtype, join.width, join.plan_hash)
        for folder in (first, second)
    )
    assert one == other


def test_other_weights_are_refused_by_the_folder_s_name(make_folder: Callable[..., Path]) -> None:
    first, other = make_folder("llama"), make_folder("llama", "other", vocab_size=401)
    with pytest.raises(RequestError, match=r"other: these are not the weights of run far, whose target is .*target"):
        _find(joining(first), str(other), lambda line: None)


def test_a_model_that_is_not_here_asks_for_its_folder(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    join = joining(make_folder("llama"), target=TargetConfig(model=str(tmp_path / "nowhere"), dtype="float32"))
    with pytest.raises(RequestError, match="there is no such folder; --target FOLDER says where"):
        _find(join, None, lambda line: None)
    with pytest.raises(RequestError, match=r"elsewhere.*there is no such folder$"):
        _find(join, str(tmp_path / "elsewhere"), lambda line: None)


def test_another_protocol_is_refused_and_another_torch_is_said(make_folder: Callable[..., Path]) -> None:
    target, said = make_folder("llama"), []
    _check_versions(Path("join.json"), joining(target), said.append)
    assert said == []
    _check_versions(Path("join.json"), joining(target, versions=versions() | {"torch": "1.0"}), said.append)
    assert len(said) == 1
    assert "the run has torch 1.0, this host" in said[0]
    with pytest.raises(
        RequestError, match=rf"join.json: the run speaks protocol version 99 .*this host {PROTOCOL_VERSION}"
    ):
        _check_versions(Path("join.json"), joining(target, protocol=99), said.append)


def test_a_device_that_is_not_there_is_refused() -> None:
    found = [_devices(None, 0, 1), _devices(None, 2, 1), _devices("cpu", 2, 1), _devices("cuda:1", 2, 1)]
    assert found == [("cpu",), ("cuda:0",), ("cpu",), ("cuda:1",)]
    for asked, gpus in (("cuda:0", 0), ("cuda:2", 2), ("cuda", 2), ("gpu", 2)):
        with pytest.raises(RequestError, match=f"--device {asked}: write cpu or cuda:INDEX; {gpus} GPUs are visible"):
            _devices(asked, gpus, 1)


def test_a_divided_target_takes_as_many_devices_as_the_run_s() -> None:
    found = [_devices(None, 0, 2), _devices(None, 4, 2), _devices("cuda:3,cuda:1", 4, 2)]
    assert found == [("cpu", "cpu"), ("cuda:0", "cuda:1"), ("cuda:3", "cuda:1")]
    for asked, gpus in ((None, 1), ("cuda:0", 4), ("cuda:0,cuda:1,cuda:2", 4)):
        with pytest.raises(RequestError, match=r"the run has target.tensor_parallel = 2: name 2 devices"):
            _devices(asked, gpus, 2)
    for asked in ("cuda:0,cuda:0", "cpu,cuda:0", "cuda:0,cuda:4"):
        with pytest.raises(RequestError, match="write cpu or cuda:INDEX"):
            _devices(asked, 4, 2)
