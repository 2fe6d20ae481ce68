"""A producer that is wrong about some samples: nothing of it is trained, what passes by leaves no trace in the losses,
what stays is quarantined by sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

SHORT = ("data.eval=[]", "train.epochs=1", "train.quarantine_limit=0.05")

# In producer/fill.py. POISON: sample -> what is done to its features, and in how many tries of it.
FILL = """
import json, os
_fill, _poison, _tries = fill, json.loads(os.environ["POISON"]), {}

def _spoil(how, rows, slot):
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
    elif how == "overrun":
        end = np.frombuffer(slot, np.uint8).ctypes.data - np.frombuffer(slot.obj, np.uint8).ctypes.data + len(slot)
        memoryview(slot.obj)[end : end + 2] = b"\\x80\\x3f"

def fill(target, taps, lease, slot, job, wanted=lambda: True):
    total, halved = _fill(target, taps, lease, slot, job, wanted)
    tensors = views(slot, lease_table(lease, job))
    offsets = tensors["offsets"]
    for at, sample in enumerate(lease.samples):
        how, tries = _poison.get(str(sample), ("", 0))
        _tries[sample] = _tries.get(sample, 0) + 1
        if _tries[sample] <= tries:
            _spoil(how, tensors["features"][offsets[at] : offsets[at + 1]], slot)
            if how != "flipped":  # it is summed as it is sent; a bit flips afterwards
                total = checksum(tensors["features"])
    return total, halved
"""
# In protocol/arena.py: a late writer of an earlier attempt signs the third block that is filled, after its own writer.
ARENA = """
_end, _ended = Arena.end, []

def end(self, index, attempt):
    _ended.append(attempt)
    _end(self, index, attempt)
    if len(_ended) == 3:
        _end(self, index, attempt - 1)

Arena.end = end
"""
ONCE = {
    "3": ("nan", 1),
    "14": ("infinite", 1),
    "21": ("zero", 1),
    "33": ("repeated", 1),
    "45": ("flipped", 1),
    "58": ("overrun", 1),
}
REASONS = (
    "sample 3: tap 0 is not finite",
    "sample 14: tap",
    "sample 21: tap 0 is all zero",
    "sample 33: tap 0 is one row repeated",
    "the features do not add up",
    "the canary behind slot",
    "was written by attempt",
)


def settings(*more: str) -> list[str]:
    return [word for setting in (*SHORT, *more) for word in ("--set", setting)]


def texts(workspace: Any, name: str, what: str) -> list[str]:
    return [row["text"] for row in workspace.rows(name, "event") if row["what"] == what]


@pytest.mark.timeout(240)
def test_poison_that_passes_leaves_no_trace_and_poison_that_stays_is_quarantined_by_sample(
    workspace: Any, patch_children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workspace.run("calm", *settings()).returncode == 0
    calm = workspace.losses("calm")

    patch_children({"producer.fill": FILL, "protocol.arena": ARENA})
    monkeypatch.setenv("POISON", json.dumps(ONCE))
    passing = workspace.run("passing", *settings())
    assert passing.returncode == 0, passing.stderr
    bad = texts(workspace, "passing", "bad")
    assert [reason for reason in REASONS if not any(reason in text for text in bad)] == [], bad
    assert len(bad) == len(REASONS)  # each block once: no retry is bad again, and nothing else is
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
    once = {sample: how for sample, how in ONCE.items() if how[0] not in ("overrun", "flipped")}
    patch_children({"producer.fill": FILL})
    monkeypatch.setenv("POISON", json.dumps(once))
    passing = workspace.run("passing", *settings("ring.transport=zmq", "gpus.split=2:1"))
    assert passing.returncode == 0, passing.stderr
    assert len(texts(workspace, "passing", "bad")) >= len(once)
    assert workspace.losses("passing") == workspace.losses("calm")
