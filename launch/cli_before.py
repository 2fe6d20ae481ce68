"""The commands that come before a run: `init`, `plan` and `generate`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from launch.arguments import ConfigArgument, JsonOption, SetOption, answer, hint
from protocol.errors import RequestError


def plan(
    config: ConfigArgument,
    samples: Annotated[int | None, typer.Option(help="plan for so many samples, with --mean-tokens")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="tokens of a sample on average")] = None,
    estimate: Annotated[
        int | None, typer.Option(metavar="N", help="tokenise N rows drawn at random, not all of them", min=2)
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="CARD", help="for such cards: h200, h100-80, l40s, ...")] = None,
    gpus: Annotated[int | None, typer.Option(help="how many of them")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="free memory of their host")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The bill before a run: tokens, bytes, disk, ring, memory of each role, steps, hours; needs no GPU."""
    from launch.config import load_config
    from launch.plan_command import Request, plan_run
    from launch.plan_table import describe

    request = Request(samples=samples, mean_tokens=mean_tokens, estimate=estimate, gpu=gpu, gpus=gpus, memory=memory)
    bill = plan_run(load_config(config, set_ or ()), request, hint)
    answer(bill, describe(bill), as_json)


def init(
    target: Annotated[str, typer.Option(metavar="M", help='a model folder, a hub id, or "embedded"')],
    gpus: Annotated[int | None, typer.Option(help="how many GPUs; without it, those that are visible")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="CARD", help="another machine's: h200, h100-80, ...")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="default: the target's name .toml")] = None,
    train: Annotated[list[str] | None, typer.Option(metavar="FILE", help="training data; repeatable")] = None,
    held_out: Annotated[
        list[str] | None, typer.Option("--eval", metavar="FILE", help="held-out prompts; repeatable")
    ] = None,
) -> None:
    """Write a commented config for a target and this machine; never over a file that is there."""
    from launch.init_command import write_config

    path, plan = write_config(target, out, train or (), held_out or (), gpu, gpus, hint)
    answer({}, [f"{path} is written; next: draftwire plan {path}", *(f"note: {note}" for note in plan.notes)], False)


def generate(
    config: ConfigArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="where the answered rows go; resumed if it is there")
    ],
    max_new_tokens: Annotated[int, typer.Option(help="tokens of an answer at most", min=1)] = 256,
    turns: Annotated[str, typer.Option(metavar="last|each", help="answers of a conversation to make anew")] = "last",
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="share of all probability to draw from")] = 1.0,
    top_k: Annotated[int, typer.Option(help="tokens to draw from; 0: all")] = 0,
    seed: Annotated[int, typer.Option(help="keys the draws of each row")] = 0,
    thinking: Annotated[str | None, typer.Option(metavar="on|off", help="else as the data source has it")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="also keep the exact token ids (larger files)")] = False,
    batch_rows: Annotated[int | None, typer.Option(help="prompts answered at once (32)", min=1)] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help="ask such a server: http://HOST:PORT/v1")] = None,
    served_model: Annotated[str | None, typer.Option(metavar="NAME", help="its name for the target")] = None,
    concurrency: Annotated[int | None, typer.Option(help="requests at a time (32)", min=1, max=4096)] = None,
    retries: Annotated[int | None, typer.Option(help="of a request that fails (5)", min=0)] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="seconds of a request (600)", min=1)] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target itself answer the prompts of data.train: the data that a drafter learns most from."""
    from launch.config import load_config
    from launch.data import generate_data, generate_served
    from launch.signals import Interrupted, end_at_once
    from producer.chat_server import Server
    from producer.decoding import decoding_of

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    decoding = decoding_of(max_new_tokens, sampling, turns, thinking, tokens)
    loaded, asked = load_config(config, set_ or ()), end_at_once()
    of_a_server = {"--served-model": served_model, "--concurrency": concurrency, "--retries": retries}
    without = [name for name, value in {**of_a_server, "--timeout": timeout_s}.items() if value is not None]
    if server is None and without:
        raise RequestError(f"{without[0]} goes with --server")
    if server is not None and batch_rows is not None:
        raise RequestError("--batch-rows has no effect with --server: set --concurrency")
    try:
        if server is None:
            report, lines = generate_data(loaded, out, decoding, batch_rows or 32, hint)
        else:
            key = os.environ.get("OPENAI_API_KEY", "")
            limits = {"timeout_s": timeout_s or 600.0, "retries": 5 if retries is None else retries}
            asking = msgspec.convert({"url": server.rstrip("/"), "key": key, **limits}, Server)
            report, lines = generate_served(loaded, out, decoding, asking, served_model, concurrency or 32, hint)
    except Interrupted:
        hint(f"interrupted: what is answered is in {out}; the same command goes on from there")
        raise typer.Exit(130 if asked[-1] == signal.SIGINT else 75) from None
    answer(report, lines, as_json)
