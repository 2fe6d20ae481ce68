"""What decides the features of given token ids is in a cache's manifest, and a change of it is refused by its name."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launch.caching import manifest_of
from producer.config import TargetConfig
from protocol.cache import Cache, Manifest
from protocol.cache_config import CacheConfig
from protocol.errors import RequestError
from protocol.shards import FP8


class Request:
    """A configuration and what is known of it, to be changed one thing at a time."""

    def __init__(self, folder: Path) -> None:
        self.config: Any = SimpleNamespace(target=TargetConfig(model=str(folder), compile=False), cache=CacheConfig())
        self.found: Any = SimpleNamespace(
            target_dir=folder,
            dtype="float32",
            width=64,
            shape=SimpleNamespace(target_layer_ids=(0, 2)),
            placement=SimpleNamespace(producers=("cuda:0",)),
        )

    def manifest(self) -> Manifest:
        return manifest_of(self.config, self.found)

    def set_target(self, **changes: Any) -> None:
        self.config.target = msgspec.structs.replace(self.config.target, **changes)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def another_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


CHANGES: dict[str, Callable[[Request], Any]] = {
    "weights": lambda request: another_byte(request.found.target_dir),
    "revision": lambda request: request.set_target(revision="v2"),
    "dtype": lambda request: setattr(request.found, "dtype", "bfloat16"),
    "quantisation": lambda request: edit_config(request.found.target_dir, quantization_config={"quant_method": "awq"}),
    "taps": lambda request: setattr(request.found.shape, "target_layer_ids", (0, 3)),
    "attn": lambda request: request.set_target(attn="eager"),
    "compiled": lambda request: request.set_target(compile=True),
    "tensor_parallel": lambda request: request.set_target(tensor_parallel=2),
    "template": lambda request: (request.found.target_dir / "chat_template.jinja").write_text("another"),
    "cache.dtype": lambda request: setattr(request.config, "cache", CacheConfig(dtype="fp8")),
}


@pytest.fixture
def request_(make_folder: Callable[..., Path]) -> Request:
    return Request(make_folder())


def test_each_of_them_is_refused_by_its_name_and_nothing_else_is(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.create(tmp_path / "cache", request_.manifest())
    cache.refuse_other(request_.manifest())
    assert set(cache.manifest.fingerprint) == {*CHANGES, "transformers"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(RequestError, match=r"made with transformers = .*this configuration has 9\.9"):
        cache.refuse_other(request_.manifest())
    monkeypatch.undo()
    files = {path: path.read_bytes() for path in request_.found.target_dir.iterdir()}
    for name, change in CHANGES.items():
        other = Request(request_.found.target_dir)
        change(other)
        made, asked = cache.manifest.fingerprint, other.manifest().fingerprint
        assert made[name] != asked[name]
        # config.json is a part of what is hashed as the weights, which come first.
        with pytest.raises(RequestError, match=f"made with {'weights' if name == 'quantisation' else name} = "):
            cache.refuse_other(other.manifest())
        for path, content in files.items():
            path.write_bytes(content)


def test_a_configuration_of_fp8_describes_bytes_and_scales(request_: Request) -> None:
    request_.config.cache = CacheConfig(dtype="fp8")
    manifest = request_.manifest()
    assert (manifest.dtype, manifest.scales, manifest.features_bytes, manifest.scales_bytes) == (FP8, 2, 64, 8)
    request_.found.width = 66
    with pytest.raises(RequestError, match="no multiple of 4"):
        request_.manifest()
