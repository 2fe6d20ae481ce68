"""The eval shard and the whole set-up process on a tiny random target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

from producer.config import DataConfig, SourceConfig, TargetConfig
from producer.setup import SetupArgs, run_setup
from producer.target import load_target
from producer.template import load_tokenizer
from protocol.dataset import TokenDataset
from protocol.errors import RequestError

TAPS = (0, 2)


def chats(path: Path, questions: list[str]) -> SourceConfig:
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": "a fox"}] for q in questions]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return SourceConfig(path=str(path))


@pytest.fixture
def args(tmp_path: Path, make_folder: Callable[..., Path]) -> SetupArgs:
    train = chats(tmp_path / "train.jsonl", [f"question {i}" for i in range(6)])
    held_out = chats(tmp_path / "eval.jsonl", ["question 3", "new one", "New  one", "another", "and a third, longer"])
    return SetupArgs(
        target_dir=str(make_folder("qwen3")),
        target=TargetConfig(dtype="float32"),
        data=DataConfig(train=[train], eval=[held_out]),
        run_dir=str(tmp_path / "run"),
        dataset_dir=str(tmp_path / "run" / "dataset"),
        taps=TAPS,
        eval_prompts=8,
        eval_max_new_tokens=6,
    )


def shard(args: SetupArgs) -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(Path(args.run_dir) / "eval.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_rows_are_prompt_and_own_greedy_answer_with_their_features(args: SetupArgs) -> None:
    said: list[str] = []
    dataset = run_setup(args, said.append)
    assert len(dataset) == 6
    assert any("3 of 5 are new (1 repeated, 1 prompts" in line for line in said)
    tensors, metadata = shard(args)
    assert json.loads(metadata["taps"]) == list(TAPS)
    assert len(json.loads(metadata["prompt_ids"])) == len(tensors["prompt_lengths"]) == 3
    offsets = tensors["offsets"].tolist()
    assert (tensors["token_ids"].dtype, tensors["offsets"].dtype) == (torch.int32, torch.int64)
    assert tensors["features"].shape == (offsets[-1], 2 * 32)
    target = load_target(Path(args.target_dir), args.target, "cpu")
    tokenizer = load_tokenizer(Path(args.target_dir))
    for row, prompt_length in enumerate(tensors["prompt_lengths"].tolist()):
        ids = tensors["token_ids"][offsets[row] : offsets[row + 1]].long()
        assert tokenizer.decode(ids[:prompt_length]).endswith("<|im_start|>assistant\n")
        with torch.inference_mode():
            output = target.model(input_ids=ids[None], output_hidden_states=True)
        assert output.logits[0, prompt_length - 1 : -1].argmax(-1).tolist() == ids[prompt_length:].tolist()
        assert len(ids) - prompt_length == 6 or int(ids[-1]) == 3
        expected = torch.cat([output.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
        torch.testing.assert_close(tensors["features"][offsets[row] : offsets[row + 1]], expected, atol=1e-4, rtol=0)


def test_second_set_up_makes_nothing_and_changes_are_seen(args: SetupArgs) -> None:
    run_setup(args, lambda line: None)
    paths = [Path(args.run_dir) / name for name in ("eval.safetensors", "target_io.safetensors", "dataset/meta.json")]
    stamps = [path.stat().st_mtime_ns for path in paths]
    said: list[str] = []
    run_setup(args, said.append)
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    assert not any("loading the target" in line or "held-out" in line for line in said)
    run_setup(msgspec.structs.replace(args, taps=(1,)), said.append)
    assert [path.stat().st_mtime_ns == stamp for path, stamp in zip(paths, stamps, strict=True)] == [False, True, True]


def test_layers_to_start_from_are_written_when_asked_for_and_kept(args: SetupArgs) -> None:
    path = Path(args.run_dir) / "drafter_init.safetensors"
    run_setup(args, lambda line: None)
    assert not path.exists()
    asked = msgspec.structs.replace(args, init_layers=2)
    run_setup(asked, lambda line: None)
    with safe_open(path, framework="pt") as file:
        assert {name.split(".")[1] for name in file.keys()} == {"0", "1"}  # noqa: SIM118
    stamp = path.stat().st_mtime_ns
    said: list[str] = []
    run_setup(asked, said.append)
    assert path.stat().st_mtime_ns == stamp
    assert not any("loading the target" in line for line in said)
    run_setup(msgspec.structs.replace(args, init_layers=3), said.append)
    assert path.stat().st_mtime_ns != stamp


def test_only_so_many_prompts_and_the_same_ones_each_time(args: SetupArgs) -> None:
    few = msgspec.structs.replace(args, eval_prompts=2)
    run_setup(few, lambda line: None)
    first = json.loads(shard(few)[1]["prompt_ids"])
    (Path(args.run_dir) / "eval.safetensors").unlink()
    run_setup(few, lambda line: None)
    assert json.loads(shard(few)[1]["prompt_ids"]) == first
    assert len(first) == 2


def test_held_out_set_that_training_covers_is_refused(args: SetupArgs, tmp_path: Path) -> None:
    covered = DataConfig(train=args.data.train, eval=[chats(tmp_path / "e.jsonl", ["Question 1", "question 5"])])
    with pytest.raises(RequestError, match=r"data\.eval: no held-out prompt is left: .*0 of 2 are new"):
        run_setup(msgspec.structs.replace(args, data=covered), lambda line: None)


def test_without_held_out_data_there_is_no_shard(args: SetupArgs) -> None:
    said: list[str] = []
    run_setup(msgspec.structs.replace(args, data=DataConfig(train=args.data.train)), said.append)
    assert not (Path(args.run_dir) / "eval.safetensors").exists()
    assert any("data.eval is not set" in line for line in said)


def start(args_path: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-P", "-m", "producer.setup", str(args_path)]
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_process_makes_all_files_and_reports_progress(args: SetupArgs, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_bytes(msgspec.json.encode(args))
    done = start(path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 rows: 6 kept" in done.stdout
    assert np.array_equal(
        TokenDataset.open(args.dataset_dir).lengths, np.diff(np.load(Path(args.dataset_dir) / "offsets.npy"))
    )
    assert (Path(args.run_dir) / "eval.safetensors").is_file()
    assert (Path(args.run_dir) / "target_io.safetensors").is_file()


def test_wrong_request_ends_with_2_and_one_line(args: SetupArgs, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(args, taps=(0, 4))))
    done = start(path)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "error: drafter.taps: 4 is not a layer; target has 0 to 3"
