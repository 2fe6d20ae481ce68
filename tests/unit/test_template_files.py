"""Two model folders have the same template exactly when a tokenizer loaded from them would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from producer.template_files import template_fingerprint


def test_a_template_is_told_from_another_wherever_it_stands(tmp_path: Path) -> None:
    assert template_fingerprint(tmp_path) == ""
    found = {""}
    for name, content in (
        ("tokenizer_config.json", json.dumps({"chat_template": "a"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "b"})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "b"}]})),
        ("chat_template.jinja", "a"),
        ("chat_template.json", json.dumps({"chat_template": "c"})),
    ):
        (tmp_path / name).write_text(content)
        each = template_fingerprint(tmp_path)
        assert each not in found
        found.add(each)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a", "model_max_length": 4}))
    before = template_fingerprint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a", "model_max_length": 5}))
    assert template_fingerprint(tmp_path) == before


def test_a_saved_tokenizer_s_template_is_found(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    found = []
    for name, template in (("one", "{{ messages }}"), ("same", "{{ messages }}"), ("other", "{{ messages }}!")):
        make_tokenizer(template).save_pretrained(tmp_path / name)
        found.append(template_fingerprint(tmp_path / name))
    assert found[0] == found[1] != found[2]
    assert "" not in found
