"""The whole job on a random target of a real shape: does what `plan` says come true, and does a run survive its day?

    python benchmarks/rehearsal.py [--shape tiny|qwen3.6-27b] [--device cpu|cuda] [--folder DIR]
                                   [--set A.B=C ...] [--json]

Writes the target, its tokenizer and chats with tools and thinking into DIR (of 120 GB for the large shape; a target
that is there stays), then does what a user of examples/qwen3.6-27b.toml does, one GPU for each role unless --set
gpus.split=shared: plan; a run whose producer is killed with SIGKILL, that is stopped and resumed, with the features of
its last steps spilled into a bounded cache; evaluation, export, `cache verify`. Each figure is printed beside what
`plan` had said of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from random_target import ROOT, write_chats, write_target
from report import publish, row
from safetensors import safe_open

EXAMPLE = ROOT / "examples/qwen3.6-27b.toml"
FIXTURE = ROOT / "tests/fixtures/qwen3.6-27b/config.json"
TINY = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY_DRAFTER = "layers = 2\nblock_size = 8\nmlp = 128"
# Steps: the producer is killed after the first number, the run stopped after the second, and ends with the third.
KILLED, STOPPED, LAST = 25, 50, 70
LARGE_CACHE, SMALL_CACHE = "20GB", "2MB"
DEADLINE_S = 1500


class Rehearsal:
    """Commands of draftwire in `folder`, with the configuration that it holds."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder, self.overrides = folder, overrides
        self.run_dir = folder / "runs/rehearsal"
        self.started_s = time.monotonic()
        self.resumed_at = 0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started_s:7.1f} s] {text}", file=sys.stderr, flush=True)

    def command(self, *arguments: str, configured: bool = True) -> list[str]:
        sets = [text for override in self.overrides for text in ("--set", override)] if configured else []
        return [sys.executable, "-P", "-m", "launch.cli", *arguments, *sets]

    def call(self, *arguments: str, configured: bool = False) -> str:
        done = subprocess.run(
            self.command(*arguments, configured=configured),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: code {done.returncode}\n{done.stdout}{done.stderr}")
        self.say(f"draftwire {arguments[0]}: done")
        return done.stdout

    def run(self, *more: str) -> subprocess.Popen[bytes]:
        with (self.folder / "run.log").open("ab") as log:
            return subprocess.Popen(
                self.command("run", "config.toml", *more), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    def rows(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [each for each in found if each.get("kind") == kind]

    def wait(self, running: subprocess.Popen[bytes], step: int) -> None:
        """Until the run has made `step`."""
        self._until(running, lambda: any(each["step"] >= step for each in self.rows("step")))
        self.say(f"step {step}")

    def end(self, running: subprocess.Popen[bytes], code: int) -> None:
        if (found := running.wait(DEADLINE_S)) != code:
            raise SystemExit(f"the run ended with code {found}, not {code}\n{self.tail()}")
        self.say(f"the run ended with code {code}")

    def kill(self, module: str) -> None:
        run_dir = str(self.run_dir.relative_to(self.folder))
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if module in words and any(run_dir in word for word in words):
                os.kill(int(path.parent.name), signal.SIGKILL)
                self.say(f"{module} killed")

    def tail(self) -> str:
        return "\n".join((self.folder / "run.log").read_text(errors="replace").splitlines()[-30:])

    def _until(self, running: subprocess.Popen[bytes], there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not there():
            if running.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run ended with code {running.poll()} too early\n{self.tail()}")
            time.sleep(0.2)


def prepare(folder: Path, shape: str, device: str) -> list[str]:
    """Writes target, data and config.toml; the overrides of the example's configuration."""
    large = shape != "tiny"
    if not (folder / "target").exists():
        write_target(folder / "target", json.loads(FIXTURE.read_text())["text_config"] if large else TINY, device)
    write_chats(folder / "train.jsonl", 1200 if large else 300, 0, 1500 if large else 60)
    write_chats(folder / "held_out.jsonl", 64, 1, 1500 if large else 60)
    text = EXAMPLE.read_text(encoding="utf-8")
    (folder / "config.toml").write_text(text if large else text.replace('preset = "qwen3.6-27b"', TINY_DRAFTER))
    sets = {
        "run.name": '"rehearsal"',
        "target.model": '"target"',
        "data.train": '[{path="train.jsonl"}]',
        "data.eval": '[{path="held_out.jsonl"}]',
        "gpus.split": '"1:1"',
        "train.max_steps": LAST,
        "train.checkpoint_every": 20,
        "eval.every": 30,
        "train.batch_tokens": 65_536 if large else 2048,
        "eval.prompts": 8,
        "eval.max_new_tokens": 64 if large else 12,
    }
    if not large:
        sets |= {"train.anchors": 32, "data.max_length": 768}
    return [f"{key}={value}" for key, value in sets.items()]


def rehearse(one: Rehearsal, large: bool) -> list[dict[str, Any]]:
    planned = json.loads(one.call("plan", "config.toml", "--json", configured=True))
    planned["batch_tokens"] = [int(text.split("=")[1]) for text in one.overrides if "batch_tokens" in text][-1]
    running = one.run()
    one.wait(running, KILLED)
    one.kill("producer.worker")
    one.wait(running, STOPPED)
    one.call("stop", str(one.run_dir))
    one.end(running, 75)
    one.resumed_at = one.rows("step")[-1]["step"]
    spilling = one.run(
        "--resume", "--set", "cache.mode=spill", "--set", f"cache.max_bytes={LARGE_CACHE if large else SMALL_CACHE}"
    )
    one.end(spilling, 0)
    one.say(one.call("cache", "verify", "cache").strip().splitlines()[-1])
    measured = json.loads(one.call("eval", str(one.run_dir), "--json"))
    one.say(f"acceptance length {measured['acceptance_mean']:.3f} over {measured['prompts']} prompts")
    one.call("export", str(one.run_dir), "drafter")
    with safe_open(one.folder / "drafter/model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    one.say(f"exported: {len(shapes)} tensors, {sum(math.prod(shape) for shape in shapes):,} parameters")
    return figures(one, planned)


def figures(one: Rehearsal, planned: dict[str, Any]) -> list[dict[str, Any]]:
    """What was seen beside what `plan` had said."""
    steps, stream = one.rows("step"), one.rows("stream")[-1]
    seen_steps = [each["step"] for each in steps]
    if seen_steps != list(range(1, LAST + 1)):
        raise SystemExit(f"steps are missing or came twice: {seen_steps}")
    calm = steps[KILLED + 5 : STOPPED]
    step_s, wait_s = (float(np.median([each[key] for each in calm])) for key in ("step_s", "wait_s"))
    resumed = sum(each["tokens"] for each in steps if each["step"] > one.resumed_at)
    rows = [
        row("steps", len(steps), "steps", min(planned["steps"], LAST)),
        row(
            "streamed a token after the resume", stream["bytes_streamed"] / resumed, "bytes", planned["bytes_per_token"]
        ),
        row("tokens of a step", float(np.median([each["tokens"] for each in calm])), "tokens", planned["batch_tokens"]),
        row("a consumer's wait in a step, of all of it", wait_s, "s", step_s),
    ]
    for role, seen in (("producer", producer_bytes(one.run_dir)), ("consumer", stream["gpu_memory_bytes"][0])):
        if seen:
            rows.append(row(f"GPU memory of a {role} at most", seen / 1e9, "GB", planned["gpu_memory"][role] / 1e9))
    return rows


def producer_bytes(run_dir: Path) -> int:
    """What the producer said at its end that it had held of its GPU at most; 0 on a CPU."""
    said = re.findall(r"held (\d+) bytes of its GPU at most", (run_dir / "log/producer-0.log").read_text())
    return max(map(int, said), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=["tiny", "qwen3.6-27b"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/rehearsal"))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    overrides = prepare(asked.folder, asked.shape, asked.device) + asked.overrides
    publish(rehearse(Rehearsal(asked.folder.resolve(), overrides), asked.shape != "tiny"), asked.json)


if __name__ == "__main__":
    main()
