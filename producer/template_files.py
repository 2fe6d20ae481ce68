"""The chat template of a model folder as a hash, without a tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

# Where transformers looks for it; a tokenizer's settings may hold one, or one under each of several names.
_WHOLE = "chat_template.jinja"
_INSIDE = ("chat_template.json", "tokenizer_config.json")


def template_fingerprint(folder: Path) -> str:
    """Of all template texts in `folder`; "" when there is none. A file that is no JSON object has none."""
    found = [path.read_text(encoding="utf-8") for path in [folder / _WHOLE] if path.is_file()]
    for name in _INSIDE:
        try:
            content = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("chat_template"):
            found.append(json.dumps(content["chat_template"]))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16] if found else ""
