"""Checkpoints: bit-exact, whole or passed over by name, and never at the cost of an earlier one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from consumer import checkpoint as checkpoint_module
from consumer import checkpoints as checkpoints_module
from consumer.checkpoint import Snapshot, read_state, read_weights, write_checkpoint
from consumer.checkpoints import checkpoints, newest_good, point, problem_of, prune, read_cursor
from consumer.staging import Staging
from consumer.state import capture_weights, live_state, restore_state, served_weights
from protocol.errors import RequestError

MakeSnapshot = Callable[..., Snapshot]
FILES = ("drafter.safetensors", "state.safetensors", "config.json", "cursor.json")


def test_the_way_back_is_bit_exact(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    sent = make_snapshot(500)
    written = write_checkpoint(tmp_path, sent)
    assert written == tmp_path / "step-000500"
    weights, shape = read_weights(written)
    served = served_weights(sent.state, sent.dtype)
    for name, expected, found in (("weights", served, weights), ("state", sent.state, read_state(written))):
        assert found.keys() == expected.keys(), name
        assert all(found[key].dtype == expected[key].dtype for key in expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert shape == sent.shape
    assert read_cursor(written) == sent.cursor
    assert (tmp_path / "latest").resolve() == written
    assert os.readlink(tmp_path / "latest") == "step-000500"  # relative: the folder may be moved


def optimiser_of(drafter: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(drafter.parameters(), lr=1e-2, fused=True)


def capture_state(drafter: Any, optimiser: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    return Staging(shapes, torch.device("cpu")).capture(live_state(drafter, optimiser))


def train(drafter: Any, optimiser: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, make_drafter: Callable[..., Any], make_snapshot: MakeSnapshot, dtype: str
) -> None:
    """R1: masters, moments, counters have the same dtypes and values, and so has everything after three more steps."""
    calm = make_drafter(1, dtype)
    calm_optimiser = optimiser_of(calm)
    train(calm, calm_optimiser, range(4))
    frame = make_snapshot(4)
    state = capture_state(calm, calm_optimiser)
    snapshot = Snapshot(calm.shape, calm.compute_dtype, state, frame.cursor, frame.target)
    written = write_checkpoint(tmp_path, snapshot)
    train(calm, calm_optimiser, range(4, 7))  # the snapshot is a copy: this must not reach into it

    resumed = make_drafter(2, dtype)
    optimiser = optimiser_of(resumed)
    state = read_state(written)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    restore_state(resumed, optimiser, state)
    back = capture_state(resumed, optimiser)
    assert back.keys() == state.keys()
    assert len(back) == 4 * len(list(resumed.parameters()))
    assert all(back[name].dtype == state[name].dtype and torch.equal(back[name], state[name]) for name in state)
    train(resumed, optimiser, range(4, 7))
    expected, found = capture_state(calm, calm_optimiser), capture_state(resumed, optimiser)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(left, right) for left, right in zip(calm.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_captured_is_a_copy(make_drafter: Callable[..., Any], dtype: str) -> None:
    """The step loop goes on while the snapshot is written."""
    drafter = make_drafter(1, dtype)
    optimiser = optimiser_of(drafter)
    train(drafter, optimiser, range(1))
    captured = capture_weights(drafter) | capture_state(drafter, optimiser)
    before = {name: tensor.clone() for name, tensor in captured.items()}
    train(drafter, optimiser, range(1, 3))
    assert all(torch.equal(captured[name], before[name]) for name in before)


def test_a_state_from_before_the_first_step_restores_the_masters_alone(make_drafter: Callable[..., Any]) -> None:
    first, second = make_drafter(1), make_drafter(2)
    optimiser = optimiser_of(second)
    restore_state(second, optimiser, capture_state(first, optimiser_of(first)))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not optimiser.state


# --- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_the_file_named(
    tmp_path: Path, make_snapshot: MakeSnapshot, name: str, damage: Callable[[Path], None]
) -> None:
    earlier, newest = (write_checkpoint(tmp_path, make_snapshot(step)) for step in (10, 20))
    assert newest_good(tmp_path) == (newest, [])
    damage(newest / name)
    found, passed = newest_good(tmp_path)
    assert found == earlier
    assert len(passed) == 1
    assert "step-000020 is damaged and was passed over" in passed[0]
    assert name in passed[0]
    with pytest.raises(RequestError, match="step-000020: "):
        read_weights(newest)


def test_a_checkpoint_without_a_readable_manifest_is_passed_over(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    earlier, newest = (write_checkpoint(tmp_path, make_snapshot(step)) for step in (10, 20))
    whole = (newest / "manifest.json").read_bytes()
    for damaged in (b"", b"{", b"[]", b"null", b"\xff" + whole, whole[:-20], whole.replace(b'"crc32"', b'"crc33"')):
        (newest / "manifest.json").write_bytes(damaged)
        found, passed = newest_good(tmp_path)
        assert found == earlier
        assert "manifest.json" in passed[0]
    (newest / "manifest.json").unlink()
    assert newest_good(tmp_path)[0] == earlier


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_that_leaves_a_file_out_vouches_for_nothing(
    tmp_path: Path, make_snapshot: MakeSnapshot, name: str
) -> None:
    written = write_checkpoint(tmp_path, make_snapshot(10))
    manifest = json.loads((written / "manifest.json").read_text())
    del manifest["files"][name]
    (written / "manifest.json").write_text(json.dumps(manifest))
    assert problem_of(written) == f"manifest.json does not list {name}"


def test_any_flipped_byte_of_the_manifest_is_survived(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    written = write_checkpoint(tmp_path, make_snapshot(10))
    whole = (written / "manifest.json").read_bytes()
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        (written / "manifest.json").write_bytes(damaged)
        problem = problem_of(written)
        assert problem is None or "\n" not in problem


def test_only_finished_folders_count(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    written = write_checkpoint(tmp_path, make_snapshot(7))
    for name in (".step-000009.part", "step-12", "step-000011.bak", "stepping-000012", "000013"):
        (tmp_path / name).mkdir()
    assert checkpoints(tmp_path) == [written]
    assert newest_good(tmp_path / "nothing") == (None, [])


def test_order_is_by_step_also_past_a_million(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000005", "step-999999", "step-1000000"]


def test_a_truncated_file_is_told_by_its_size(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    written = write_checkpoint(tmp_path, make_snapshot(10))
    size = (written / "cursor.json").stat().st_size
    truncate(written / "cursor.json")
    assert problem_of(written) == f"cursor.json has {size - 1} bytes, not {size}"


# --- writes that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),  # what a full disk really raises
    ],
)
@pytest.mark.parametrize("successes", [0, 1])
def test_a_failing_write_leaves_the_earlier_one_and_nothing_half_done(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch, failure: Exception, successes: int
) -> None:
    earlier = write_checkpoint(tmp_path, make_snapshot(10))
    there = sorted(tmp_path.rglob("*"))
    real, calls = checkpoint_module.save_file, []

    def failing(tensors: Any, path: Path, **more: Any) -> None:
        calls.append(path)
        if len(calls) > successes:
            path.write_bytes(b"half")
            raise failure
        real(tensors, path, **more)

    monkeypatch.setattr(checkpoint_module, "save_file", failing)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, make_snapshot(20))
    assert len(calls) == successes + 1
    assert sorted(tmp_path.rglob("*")) == there
    assert newest_good(tmp_path) == (earlier, [])
    assert (tmp_path / "latest").resolve() == earlier


def test_what_an_earlier_kill_left_half_done_is_replaced(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    part = tmp_path / ".step-000010.part"
    part.mkdir(parents=True)
    (part / "junk").write_text("x")
    written = write_checkpoint(tmp_path, make_snapshot(10))
    assert sorted(path.name for path in written.iterdir()) == sorted([*FILES, "manifest.json"])
    assert not part.exists()


def test_the_same_step_written_again_replaces_the_first(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    write_checkpoint(tmp_path, make_snapshot(10, seed=1))
    written = write_checkpoint(tmp_path, make_snapshot(10, seed=2))
    assert float(read_state(written)["exp_avg.fc.weight"][0]) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000010"]


def whole(folder: Path) -> list[Path]:
    """Good checkpoints of step 10, under its own or a hidden name."""
    return [path for path in folder.glob("*step-000010*") if problem_of(path) is None]


def test_the_same_step_is_on_the_disk_at_every_moment(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, make_snapshot(10, seed=1))
    renamed: list[str] = []
    rename, remove = Path.rename, shutil.rmtree

    def watched_rename(path: Path, target: Path) -> Path:
        assert whole(tmp_path)
        moved = rename(path, target)
        assert whole(tmp_path)
        renamed.append(target.name)
        return moved

    def watched_remove(path: Path, ignore_errors: bool = False) -> None:
        remove(path, ignore_errors)
        assert whole(tmp_path)

    monkeypatch.setattr(Path, "rename", watched_rename)
    monkeypatch.setattr(shutil, "rmtree", watched_remove)
    write_checkpoint(tmp_path, make_snapshot(10, seed=2))
    assert renamed == [".step-000010.old", "step-000010", "latest"]


def test_the_first_comes_back_when_the_second_cannot_take_its_place(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_checkpoint(tmp_path, make_snapshot(10, seed=1))
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_checkpoint(tmp_path, make_snapshot(10, seed=2))
    assert newest_good(tmp_path) == (written, [])
    assert float(read_state(written)["exp_avg.fc.weight"][0]) == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000010"]


def test_what_a_kill_left_aside_is_removed_by_the_next_one(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    aside = tmp_path / ".step-000010.old"
    write_checkpoint(tmp_path, make_snapshot(10)).rename(aside)
    write_checkpoint(tmp_path, make_snapshot(20))
    assert not aside.exists()
    assert steps(tmp_path) == [20]


# --- pruning ---------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(folder)]


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    """train.keep_checkpoints counts the newest; the best by acceptance stays besides."""
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(tmp_path, make_snapshot(step))
    point(tmp_path, "best", tmp_path / "step-000020")
    prune(tmp_path, 2)
    assert steps(tmp_path) == [20, 40, 50]
    prune(tmp_path, 9)
    assert steps(tmp_path) == [20, 40, 50]
    point(tmp_path, "best", tmp_path / "step-000050")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [50]
    assert (tmp_path / "best").exists()


def test_prune_without_a_best_keeps_the_newest(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, make_snapshot(step))
    prune(tmp_path, 1)
    assert steps(tmp_path) == [20]


def test_prune_never_removes_the_only_good_one(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    """Resumed from 10 because 20 is damaged, then stopped at 15."""
    for step in (10, 20):
        write_checkpoint(tmp_path, make_snapshot(step))
    truncate(tmp_path / "step-000020" / "state.safetensors")
    written = write_checkpoint(tmp_path, make_snapshot(15))
    prune(tmp_path, 1)
    assert newest_good(tmp_path)[0] == written


def test_damaged_ones_do_not_count_and_go_when_they_lie_behind(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(tmp_path, make_snapshot(step))
    for step in (20, 40):
        truncate(tmp_path / f"step-{step:06d}" / "state.safetensors")
    prune(tmp_path, 3)
    assert steps(tmp_path) == [10, 20, 30, 40, 50]
    prune(tmp_path, 2)
    assert steps(tmp_path) == [30, 40, 50]


def test_prune_keeps_the_one_just_written_below_newer_ones(tmp_path: Path, make_snapshot: MakeSnapshot) -> None:
    for step in (20, 30, 10):
        write_checkpoint(tmp_path, make_snapshot(step))
    prune(tmp_path, 1)
    assert steps(tmp_path) == [10, 30]


def test_what_is_known_to_be_good_is_not_read_again(
    tmp_path: Path, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [write_checkpoint(tmp_path, make_snapshot(step)) for step in (10, 20, 30)]
    monkeypatch.setattr(checkpoints_module, "problem_of", pytest.fail)
    prune(tmp_path, 2, written)
    assert steps(tmp_path) == [20, 30]
