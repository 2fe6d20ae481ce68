"""The `draftwire` command. Nothing heavy is imported before it is known what to do: `--help` is instant."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.metrics import to_json
from protocol.errors import DraftwireError, RequestError
from protocol.version import DRAFTWIRE_VERSION

WATCH_S = 2.0

app = typer.Typer(
    name="draftwire",
    help="Train the draft model of a speculative decoder while its hidden states are still warm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="a TOML config (docs/configuration.md)")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="override one key; repeatable")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]


def say(line: str) -> None:
    print(line, flush=True)


def hint(line: str) -> None:
    """Progress of a command whose stdout is its answer."""
    print(line, file=sys.stderr, flush=True)


@app.command()
def run(
    config: ConfigArgument,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest good checkpoint, exactly")] = False,
    fork: Annotated[
        str | None,
        typer.Option("--fork", metavar="CHECKPOINT", help="start from another run's weights, with a new plan"),
    ] = None,
    with_optimiser: Annotated[bool, typer.Option("--with-optimiser", help="fork the optimiser's state too")] = False,
    set_: SetOption = None,
) -> None:
    """Produce and train together, under supervision, to an exported drafter."""
    from launch.config import fork_config, load_config
    from launch.live import Screen
    from launch.run import run as run_training

    loaded, forked_from = load_config(config, set_ or ()), None
    if fork is not None:
        from launch.checkpoint_commands import find_checkpoint

        forked_from, checkpoint = find_checkpoint(fork)
        loaded = fork_config(loaded, checkpoint, with_optimiser)
    elif with_optimiser:
        raise RequestError("--with-optimiser goes with --fork")
    with Screen() as screen:
        code = run_training(loaded, resume, screen, forked_from)
    raise typer.Exit(code)


@app.command()
def prepare(config: ConfigArgument, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Chat data to a token dataset, with a report of every skipped row (`run` does it by itself)."""
    from launch.config import load_config
    from launch.data import prepare_dataset

    report, lines = prepare_dataset(load_config(config, set_ or ()), hint)
    _answer(report, lines, as_json)


@app.command()
def generate(
    config: ConfigArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="where the answered rows go; resumed if it is there")
    ],
    max_new_tokens: Annotated[int, typer.Option(help="tokens of an answer at most", min=1)] = 256,
    batch_rows: Annotated[int, typer.Option(help="prompts answered at once", min=1)] = 32,
    tokens: Annotated[bool, typer.Option("--tokens", help="also keep the exact token ids (larger files)")] = False,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target itself answer the prompts of data.train (greedy): the data that a drafter learns most from."""
    from launch.config import load_config
    from launch.data import generate_data

    report, lines = generate_data(load_config(config, set_ or ()), out, max_new_tokens, batch_rows, tokens, hint)
    _answer(report, lines, as_json)


@app.command()
def status(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="a run's name or folder, or latest")] = "latest",
    watch: Annotated[bool, typer.Option("--watch", help="again every two seconds, until the run has ended")] = False,
    as_json: JsonOption = False,
) -> None:
    """What a run is doing, or did."""
    from launch.runfolder import find_run
    from launch.summary import describe, summarise

    folder = find_run(run_name)
    found = summarise(folder)
    _answer(found, describe(found), as_json)
    while watch and found["state"] == "running":
        time.sleep(WATCH_S)
        found = summarise(folder)
        _answer(found, ["", *describe(found)], as_json)


@app.command()
def stop(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="a run's name or folder, or latest")] = "latest",
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds to wait for the end", min=0)] = 600,
) -> None:
    """Let a run checkpoint at its next step boundary and end; `run --resume` goes on from there."""
    from launch.runfolder import find_run
    from launch.stop import stop_run
    from launch.summary import describe, summarise

    folder = find_run(run_name)
    stop_run(folder, timeout_s)
    for line in describe(summarise(folder)):
        say(line)


@app.command("eval")
def eval_(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="RUN, RUN@best or RUN@STEP")],
    as_json: JsonOption = False,
) -> None:
    """Acceptance length of a checkpoint on the run's held-out prompts; needs no target."""
    from launch.checkpoint_commands import evaluate

    report, lines = evaluate(checkpoint)
    _answer(report, lines, as_json)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="RUN, RUN@best or RUN@STEP")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder for config.json, model.safetensors, README.md")],
) -> None:
    """Write a checkpoint in z-lab's format, at any time, also in the middle of a run."""
    from launch.checkpoint_commands import export_checkpoint

    export_checkpoint(checkpoint, out)
    say(f"drafter in {out}; its README.md says how to serve it")


@app.command()
def produce(
    join: Annotated[Path, typer.Argument(metavar="JOIN.json", help="of a run with hosts.listen: runs/NAME/join.json")],
    target: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where the target lies here, if not where the run has it")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...; else the first GPU, or the CPU")] = None,
    patience_s: Annotated[float, typer.Option("--patience", help="seconds to try when out of reach", min=0)] = 600,
) -> None:
    """One producer for a run on another host, until that run ends."""
    from launch.produce import produce as serve

    raise typer.Exit(serve(join, target, device, patience_s, say))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="also check this config's needs")] = None,
    golden: Annotated[list[Path] | None, typer.Option(help="recompute a golden training step; repeatable")] = None,
    device: Annotated[str, typer.Option(help="where golden steps are computed: cpu or cuda")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """What this machine has, what is missing and what that costs."""
    from launch.doctor import examine, recompute_goldens

    if golden:
        report, lines, sound = recompute_goldens(golden, device)
    else:
        report, lines, sound = examine(config)
    _answer(report, lines, as_json)
    raise typer.Exit(0 if sound else 1)


def _answer(report: dict[str, Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        say(to_json(report))
        return
    for line in lines:
        say(line)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        say(f"draftwire {DRAFTWIRE_VERSION}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """The console script: errors raised on purpose become one line and an exit code (2 wrong request, 1 failed)."""
    try:
        app(arguments)
    except (DraftwireError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, RequestError) else 1)


if __name__ == "__main__":
    main()
