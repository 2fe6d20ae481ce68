"""The printed difference of two configurations."""

from __future__ import annotations

from launch.difference import differences


def test_changed_new_and_gone_keys_are_named_and_equal_ones_are_not():
    then = {"train": {"lr": 1e-3, "epochs": 1, "old": 2}, "run": {"name": "a"}}
    now = {"train": {"lr": 2e-3, "epochs": 1}, "run": {"name": "a"}, "eval": {"every": 5}}
    assert differences(then, now) == [
        "eval.every: 'nothing' -> 5",
        "train.lr: 0.001 -> 0.002",
        "train.old: 2 -> 'nothing'",
    ]
    assert differences(now, now) == []
