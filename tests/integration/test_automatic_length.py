"""`data.max_length = "auto"`: the data is prepared before anything of the run is decided, and a resume finds it so."""

from __future__ import annotations

import json


def test_a_run_takes_its_length_from_the_data(workspace):
    finished = workspace.run("measured", '--set=data.max_length="auto"', "--set=train.epochs=1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (dataset,) = [path for path in (workspace.runs / "datasets").iterdir() if path.is_dir()]
    meta = json.loads((dataset / "meta.json").read_text())
    assert 0 < meta["max_length"] < 64
    assert meta["report"]["cut_supervised_tokens"] <= 0.02 * meta["report"]["supervised_tokens"] / 0.98
    assert f"max_length {meta['max_length']} cuts" in finished.stdout + finished.stderr
