"""A producer that is wrong about some samples: nothing of it is trained, what passes by leaves no trace in the losses,
what stays is quarantined by sample."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.dataset import TokenDataset
from protocol.job import read_job
from protocol.plan import Plan

SHORT = ("data.eval=[]", "train.epochs=1", "train.quarantine_limit=0.05")

# In producer/fill.py. POISON: sample -> what is done to its features, and in how many tries of it.
FILL = """
import json, os
from producer.stage import Done
from protocol.block import checksum
_fill, _poison, _tries = fill, json.loads(os.environ["POISON"]), {}

def _spoil(how, rows, tokens, slot):
    if how == "nan":
        rows[1, 3] = np.nan
    elif how == "infinite":
        rows[2, -1] = np.inf
    elif how == "zero":
        rows[:, :32] = 0
    elif how == "repeated":
        rows[:] = rows[0]
    elif how == "flipped":
        rows.view(np.uint8)[0, 5] ^= 4
    elif how == "token":
        tokens.view(np.uint8)[0] ^= 1
    elif how == "overrun":
        end = np.frombuffer(slot, np.uint8).ctypes.data - np.frombuffer(slot.obj, np.uint8).ctypes.data + len(slot)
        memoryview(slot.obj)[end : end + 2] = b"\\x80\\x3f"

def fill(target, taps, lease, slot, job, stage, wanted=lambda: True):
    filled, halved = _fill(target, taps, lease, slot, job, stage, wanted)
    total, busy_s = filled.wait()
    tensors = views(slot, lease_table(lease, job))
    offsets = tensors["offsets"]
    for at, sample in enumerate(lease.samples):
        how, tries = _poison.get(str(sample), ("", 0))
        _tries[sample] = _tries.get(sample, 0) + 1
        if _tries[sample] <= tries:
            rows = slice(offsets[at], offsets[at + 1])
            _spoil(how, tensors["features"][rows], tensors["token_ids"][rows], slot)
            if how != "flipped":  # it is summed as it is sent; a bit flips afterwards
                total = checksum(tensors["features"])
    return Done(total, busy_s), halved
"""
# In protocol/arena.py: a late writer of an earlier attempt signs the third block that is filled, after its own writer.
ARENA = """
_sign, _signed = Arena.sign, []

def sign_late(self, index, attempt):
    _signed.append(attempt)
    _sign(self, index, attempt)
    if len(_signed) == 6:  # a block is signed before its first byte and after its last
        _sign(self, index, attempt - 1)

Arena.sign = sign_late
"""
# What is done to a sample, and what is said of its block.
REASONS = {
    "nan": "sample {sample}: tap 0 is not finite",
    "infinite": "sample {sample}: tap 0 is not finite",
    "zero": "sample {sample}: tap 0 is all zero",
    "repeated": "sample {sample}: tap 0 is one row repeated",
    "flipped": "the features do not add up",
    "token": "token_ids in the slot are not the dataset's",
    "overrun": "the canary behind slot",
}


def settings(*more: str) -> list[str]:
    return [word for setting in (*SHORT, *more) for word in ("--set", setting)]


def one_a_block(workspace: Any, name: str) -> list[int]:
    """The first sample of every block of a run, in order."""
    job = read_job(workspace.runs / name)
    dataset = TokenDataset.open(Path(job.dataset_dir))
    plan = Plan(dataset.lengths, dataset.eligible, job.plan, dataset.fingerprint)
    return [block.samples[0] for step in range(plan.total_steps) for block in plan.blocks(step)]


def texts(workspace: Any, name: str, what: str) -> list[str]:
    return [row["text"] for row in workspace.rows(name, "event") if row["what"] == what]


@pytest.mark.timeout(240)
def test_poison_that_passes_leaves_no_trace_and_poison_that_stays_is_quarantined_by_sample(
    workspace: Any, patch_children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1: refused with sample and producer, counted, and never trained on."""
    assert workspace.run("calm", *settings()).returncode == 0
    calm = workspace.losses("calm")

    patch_children({"producer.fill": FILL, "protocol.arena": ARENA})
    spoiled = dict(zip(REASONS, one_a_block(workspace, "calm")[4:], strict=False))  # the third block has its own
    monkeypatch.setenv("POISON", json.dumps({sample: (how, 1) for how, sample in spoiled.items()}))
    passing = workspace.run("passing", *settings())
    assert passing.returncode == 0, passing.stderr
    bad = texts(workspace, "passing", "bad")
    reasons = [REASONS[how].format(sample=sample) for how, sample in spoiled.items()] + ["was written by attempt"]
    assert [reason for reason in reasons if not any(reason in text for text in bad)] == [], bad
    assert all(re.match(r"step \d+ block \d+ of producer-0: ", text) for text in bad), bad
    assert len(bad) == len(reasons) == 8  # each block once: no retry is bad again, and nothing else is
    assert workspace.losses("passing") == calm
    assert workspace.rows("passing", "step")[-1]["samples_trained"] == 64

    patch_children({"producer.fill": FILL})
    monkeypatch.setenv("POISON", json.dumps({"7": ("nan", 99)}))
    staying = workspace.run("staying", *settings())
    assert staying.returncode == 0, staying.stderr
    assert len(texts(workspace, "staying", "bad")) == 3
    assert texts(workspace, "staying", "quarantine") == [
        "1 samples are quarantined, the last one sample 7: sample 7: tap 0 is not finite"
    ]
    cursor = json.loads((workspace.runs / "staying/checkpoints/latest/cursor.json").read_text())
    assert cursor["quarantined"] == {"7": "sample 7: tap 0 is not finite"}
    assert [step for step, _ in workspace.losses("staying")] == [step for step, _ in calm]
    assert workspace.rows("staying", "step")[-1]["samples_trained"] == 63
    assert "quarantined samples 1" in staying.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_over_zeromq_passing_poison_leaves_no_trace_either(
    workspace: Any, patch_children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workspace.run("calm", *settings()).returncode == 0
    hows = ("nan", "infinite", "zero", "repeated", "flipped", "token")
    spoiled = dict(zip(hows, one_a_block(workspace, "calm"), strict=False))
    patch_children({"producer.fill": FILL})
    monkeypatch.setenv("POISON", json.dumps({sample: (how, 1) for how, sample in spoiled.items()}))
    passing = workspace.run("passing", *settings("ring.transport=zmq", "gpus.split=2:1"))
    assert passing.returncode == 0, passing.stderr
    bad = texts(workspace, "passing", "bad")
    assert all(any(REASONS[how].format(sample=sample) in text for text in bad) for how, sample in spoiled.items()), bad
    assert workspace.losses("passing") == workspace.losses("calm")
