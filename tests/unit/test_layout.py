"""Where code lives and what it may touch: four packages in one root, a light command line, no pickle anywhere."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "producer", "consumer", "launch")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SCRIPT = """
import json, sys
import launch.cli, consumer, producer, protocol  # as `draftwire --help` does
light = sorted(name for name in ("torch", "transformers", "zmq", "numpy") if name in sys.modules)
import launch.config, launch.run, launch.coordinator
heavy = sorted(name for name in ("torch", "transformers") if name in sys.modules)
print(json.dumps({
    "roots": sorted({module.__path__[0].rpartition("/")[0] for module in (launch, consumer, producer, protocol)}),
    "light": light,
    "heavy": heavy,
}))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a fresh interpreter finds, started in a folder that has packages of the same names."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for package in PACKAGES:
        (folder / f"{package}.py").write_text("raise SystemExit('the wrong one')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_four_packages_come_from_one_root(fresh: dict[str, list[str]]) -> None:
    assert fresh["roots"] == [str(ROOT)]


def test_the_command_line_is_light_and_the_launcher_needs_no_torch(fresh: dict[str, list[str]]) -> None:
    assert fresh["light"] == []
    assert fresh["heavy"] == []


def imports(path: Path) -> set[str]:
    """Top-level names of everything a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module).partition(".")[0])
    return names


FORBIDDEN = {
    "protocol": {"torch", "transformers", "safetensors", "producer", "consumer", "launch"},
    "producer": {"consumer", "launch"},
    "consumer": {"producer", "launch"},
    "launch": set(),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way_only_and_nothing_is_pickled(path: Path) -> None:
    found = imports(path)
    assert not found & FORBIDDEN[path.relative_to(ROOT).parts[0]]
    assert not found & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize(
    "word", ["recv_pyobj", "send_pyobj", "zmq.PUB", "zmq.SUB", "zmq.XPUB", "zmq.XSUB", "torch.load", "torch.save"]
)
def test_no_call_that_runs_or_loses_what_a_peer_sent(word: str) -> None:
    assert [str(path) for path in FILES if word in path.read_text()] == []


def test_sockets_are_made_in_one_place() -> None:
    assert [path.name for path in FILES if ".socket(zmq." in path.read_text()] == ["sockets.py"]


def test_every_file_says_what_it_is_for_and_stays_small() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
        most = 370 if path.name == "messages.py" else 300  # every message stands in one list, with what it promises
        assert len(path.read_text().splitlines()) <= most, f"{path} is long"


def test_tests_have_no_packages_and_no_name_twice() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [path for path in files if path.name == "__init__.py"] == []
    names = [path.name for path in files if path.name.startswith("test_")]
    assert len(set(names)) == len(names)
