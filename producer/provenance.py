"""How generated answers were made: one file beside them, and the check that a resumed job goes on in the same way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from producer.config import DataConfig
from producer.decoding import Decoding
from producer.prepare import source_settings
from producer.samples import SampleMaker
from protocol.errors import RequestError
from protocol.version import DRAFTWIRE_VERSION

# Facts for the reader: another name of the same weights, or another release, is no other setting.
_INFORMATIVE = ("model", "revision", "transformers", "draftwire", "server")


def provenance_of(data: DataConfig, maker: SampleMaker, decoding: Decoding, made_by: dict[str, Any]) -> dict[str, Any]:
    """What decides the answers to `data.train`, JSON-ready; `made_by` tells the target's side of it. Raises
    RequestError when a data file cannot be read."""
    return {
        **made_by,
        "tokenizer": maker.tokenizer_id,
        "max_new_tokens": decoding.max_new_tokens,
        "max_length": maker.max_length,
        "decoding": decoding.described() if decoding.sampling.temperature else "greedy",
        "turns": decoding.turns,
        "thinking": decoding.thinking,
        "tokens": decoding.with_tokens,
        "data": [{"path": source.path, **source_settings(source)} for source in data.train],
        "draftwire": DRAFTWIRE_VERSION,
    }


def begin_output(out: Path, provenance: dict[str, Any]) -> int:
    """Readies `out` for appending and returns how many complete lines it holds; a line that was cut off is removed.

    `OUT.provenance.json` is written before the first line and compared later. Raises RequestError that names every
    differing setting, and for a file that is not of this making.
    """
    beside = out.with_name(f"{out.name}.provenance.json")
    if not out.exists() or not out.stat().st_size:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(beside, json.dumps(provenance, indent=2, ensure_ascii=False) + "\n")
        return 0
    try:
        made_with = _comparable(json.loads(beside.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError):
        raise RequestError(
            f"{out} is there, but {beside.name}, which says how it was made, is missing or damaged: name another file"
        ) from None
    wanted = _comparable(provenance)
    differ = [key for key in wanted if made_with.get(key) != wanted[key]]
    if differ:
        raise RequestError(f"{out} was made with another {', '.join(differ)}; name another file or delete it")
    lines, good_bytes = _complete_lines(out)
    os.truncate(out, good_bytes)
    return lines


def _comparable(provenance: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in provenance.items() if key not in _INFORMATIVE}
    # A data file that was moved is still the same data.
    return kept | {"data": [{key: source[key] for key in source if key != "path"} for source in kept["data"]]}


def _complete_lines(out: Path) -> tuple[int, int]:
    lines = good_bytes = 0
    with out.open("rb") as stream:
        for raw in stream:
            if not raw.endswith(b"\n"):
                break
            try:
                known = "finish_reason" in json.loads(raw)
            except (ValueError, TypeError):
                known = False
            if not known:
                raise RequestError(f"{out}:{lines + 1}: not a line of `draftwire generate`; name another file")
            lines += 1
            good_bytes += len(raw)
    return lines, good_bytes


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
