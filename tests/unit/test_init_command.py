"""`draftwire init`: what it writes is known, reads back as it was meant, passes `plan`, and overwrites nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consumer.presets import PRESETS
from launch import init_command, site
from launch.cli import main
from launch.config import Config, load_config
from launch.init_command import first_config, write_config
from launch.machine import Gpu
from launch.plan_command import Request, plan_run
from producer.config import SourceConfig, TargetConfig
from producer.locate import read_target_facts
from protocol.errors import RequestError

FOLDER = Path(__file__).parents[1] / "fixtures" / "qwen3.6-27b"


@pytest.fixture(autouse=True)
def _a_laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site, "visible_gpus", lambda: [])
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 64 << 30)


def written(model: str, **options: Any) -> tuple[Path, Config]:
    asked: dict[str, Any] = {"out": None, "train": (), "held_out": (), "gpu": None, "gpus": None, **options}
    path, _ = write_config(model, say=lambda line: None, **asked)
    return path, load_config(path)


def test_every_key_is_known_and_the_result_reads_back_as_it_was_meant(tmp_path: Path) -> None:
    path, loaded = written(str(FOLDER), gpu="h200", gpus=8)
    assert path == Path("qwen3.6-27b.toml")
    sources = [SourceConfig(path="train.jsonl")]
    meant = first_config(TargetConfig(model=str(FOLDER)), read_target_facts(FOLDER), sources, [])
    raw = msgspec.convert(tomllib.loads(path.read_text()), Config)
    assert msgspec.structs.replace(raw, gpus=meant.gpus) == meant
    assert loaded.data.train[0].path == str(tmp_path / "train.jsonl")
    assert (loaded.drafter.heads, loaded.drafter.head_dim) == (32, 128)
    assert loaded.drafter.taps == (1, 16, 31, 46, 61)


QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "vocab_size": 151936,
    "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_config_for_the_target_of_each_preset_loads_with_and_without_it(preset: str, tmp_path: Path) -> None:
    """Taps and sizes that `init` writes are those of the published drafters; the preset may take their place."""
    folder = FOLDER
    if preset == "qwen3-8b":
        folder = tmp_path / "Qwen3-8B"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    path, loaded = written(str(folder), gpu="h200", gpus=8)
    published = PRESETS[preset]
    for key in ("taps", "layers", "block_size", "heads", "kv_heads", "head_dim", "mlp", "rope_theta"):
        ours = getattr(loaded.drafter, key)
        assert ours in (published[key], None), key
    assert loaded.drafter.taps == published["taps"]
    path.write_text(f'{path.read_text()}\n[drafter]\npreset = "{preset}"\n' if "[drafter]" not in path.read_text()
                    else path.read_text().replace("[drafter]", f'[drafter]\npreset = "{preset}"', 1))  # fmt: skip
    again = load_config(path)
    assert again.drafter.mask_token == published["mask_token"]
    assert again.drafter.taps == published["taps"]


def test_the_slower_side_gets_more_cards() -> None:
    _, loaded = written(str(FOLDER), gpu="h200", gpus=8)
    producers, consumers = map(int, loaded.gpus.split.split(":"))
    assert producers + consumers == 8
    assert 1 <= producers < consumers


def test_what_it_writes_passes_plan() -> None:
    path, loaded = written(str(FOLDER), gpu="h200", gpus=8)
    bill = plan_run(loaded, Request(samples=1000, mean_tokens=500, gpu="h200", gpus=8), lambda line: None)
    assert f"{bill['ring_slots']} slots" in path.read_text()
    assert bill["steps"] > 6
    assert bill["bytes_per_token"] == 51_200


def test_each_value_has_its_reason() -> None:
    path, _ = written(str(FOLDER), gpu="h200", gpus=8)
    text = path.read_text()
    reasons = ("64 layers of 5120", "53.79 GB of weights", "second to the third-last", "24 of 256", "8 x NVIDIA H200")
    assert [reason for reason in reasons if reason not in text] == []
    assert text.count("#") > 15


def test_a_small_local_target_trains_a_small_drafter(
    make_folder: Callable[..., Path], make_chats: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_folder("llama", num_hidden_layers=6)
    chats, held_out = make_chats(20), make_chats(4, "held_out.jsonl", 20)
    path, loaded = written(
        "target", out=tmp_path / "sub" / "c.toml", train=["chats.jsonl"], held_out=["held_out.jsonl"]
    )
    assert Path(loaded.target.model) == folder
    assert Path(loaded.data.train[0].path).resolve() == chats
    assert Path(loaded.data.eval[0].path).resolve() == held_out
    assert (loaded.drafter.block_size, loaded.data.max_length, loaded.gpus.split) == (8, 256, "1:1")
    bill = plan_run(loaded, Request(), lambda line: None)
    assert (bill["samples"], bill["basis"], bill["weights_from"]) == (20, "prepared", "files")
    assert "no GPU" in path.read_text()


def test_the_embedded_target_needs_no_folder(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder("llama", num_hidden_layers=8)
    monkeypatch.setattr("producer.locate.embedded_target", lambda say: folder)
    path, loaded = written("embedded")
    assert (path.name, loaded.target.model) == ("embedded.toml", "embedded")
    assert plan_run(loaded, Request(samples=10, mean_tokens=20), lambda line: None)["samples"] == 10


def test_nothing_is_overwritten(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("precious")
    with pytest.raises(SystemExit) as ended:
        main(["init", "--target", str(FOLDER), "--out", "mine.toml"])
    assert ended.value.code == 2
    assert "mine.toml is there already" in capfd.readouterr().err
    assert Path("mine.toml").read_text() == "precious"


def test_a_machine_that_cannot_work_gets_no_config() -> None:
    with pytest.raises(
        RequestError, match=r"what would fit: 2 x NVIDIA H100 80GB HBM3 \(gpus\.split = \"1:1\"\), or 1 x h200"
    ):
        written(str(FOLDER), gpu="h100-80", gpus=1)
    assert list(Path().glob("*.toml")) == []


def test_gpus_that_nobody_has_named_are_shared_out_evenly() -> None:
    path, loaded = written(str(FOLDER), gpus=4, out=Path("four.toml"))
    assert loaded.gpus.split == "2:2"
    assert "4 x GPU of unknown memory" in path.read_text()


def test_a_machine_too_small_for_the_target_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 8 << 30)
    path, _ = written(str(FOLDER))
    assert "# not on this machine: target.model" in path.read_text()


def test_visible_gpus_are_used_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Gpu("NVIDIA H200", 140 << 30, 140 << 30, "0", "GPU-1")
    monkeypatch.setattr(site, "visible_gpus", lambda: [h200] * 4)
    monkeypatch.setattr(site, "free_memory_bytes", lambda: 1 << 40)
    assert sum(map(int, written(str(FOLDER))[1].gpus.split.split(":"))) == 4
    assert written(str(FOLDER), gpus=1, out=Path("one.toml"))[1].gpus.split == "shared"
    with pytest.raises(RequestError, match="--gpus 8: 4 are visible"):
        written(str(FOLDER), gpus=8, out=Path("eight.toml"))


def test_names_of_files() -> None:
    assert init_command._plain("Qwen/Qwen3-8B") == "qwen3-8b"
    assert init_command._plain("/models/a b@c/") == "a-b-c"
    assert init_command._plain("..") == "run"
