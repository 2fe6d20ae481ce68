"""The `draftwire` command. Nothing heavy is imported before it is known what to do: `--help` is instant."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from launch.arguments import ConfigArgument, JsonOption, SetOption, answer, hint, say
from launch.cache_cli import app as cache_app
from launch.cli_before import generate, init, plan
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
app.add_typer(cache_app, name="cache")

for command in (init, plan, generate):
    app.command()(command)


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
        from launch.measure import find_checkpoint

        forked_from, checkpoint = find_checkpoint(fork)
        loaded = fork_config(loaded, checkpoint, with_optimiser)
    elif with_optimiser:
        raise RequestError("--with-optimiser goes with --fork")
    with Screen() as screen:
        code = run_training(loaded, resume, screen, forked_from)
    raise typer.Exit(code)


@app.command()
def prepare(
    config: ConfigArgument,
    show: Annotated[int, typer.Option("--show", metavar="N", help="print N samples, what is learned in colour")] = 0,
    workers: Annotated[
        int | None, typer.Option(help="processes that tokenise; without it, as many as pay", min=1)
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat data to a token dataset, with a report of every skipped row (`run` does it by itself)."""
    from launch.config import load_config
    from launch.data import prepare_dataset

    if show and as_json:
        raise RequestError("--show is for people: it goes without --json")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    report, lines = prepare_dataset(load_config(config, set_ or ()), hint, workers, show, colour)
    answer(report, lines, as_json)


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
    answer(found, describe(found), as_json)
    while watch and found["state"] == "running":
        time.sleep(WATCH_S)
        found = summarise(folder)
        answer(found, ["", *describe(found)], as_json)


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


@app.command()
def cooldown(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="a run's name or folder, or latest")] = "latest",
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds to wait for its answer", min=0)] = 60,
) -> None:
    """Let a run's learning rate fall from its next step on, over a fifth of all its steps, and end it then as done."""
    from launch.runfolder import find_run
    from launch.stop import cool_down

    folder = find_run(run_name)
    say(f"{folder.name}: {cool_down(folder, timeout_s)}")


@app.command()
def tune(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="a TOML config")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="measurements to replay, of any machine")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs to divide; else those that are visible", min=1)] = None,
    again: Annotated[bool, typer.Option("--again", help="measure although it was measured before")] = False,
    seconds: Annotated[float, typer.Option(help="seconds to measure each part", min=1)] = 30,
    write: Annotated[bool, typer.Option("--write", help="put the best split into CONFIG")] = False,
    verify_s: Annotated[
        float, typer.Option("--verify", metavar="SECONDS", help="also run the best splits for so long", min=0)
    ] = 0,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The best split of the GPUs between producers and trainers, from what each side does alone on this machine."""
    from launch.tune import tune as tune_splits
    from launch.tune_here import Wish

    report, lines = tune_splits(config, set_ or (), Wish(source, gpus, again, seconds, write, verify_s))
    answer(report, lines, as_json)


@app.command("eval")
def eval_(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="RUN, RUN@best or RUN@STEP")],
    as_json: JsonOption = False,
) -> None:
    """Acceptance length of a checkpoint on the run's held-out prompts; needs no target."""
    from launch.checkpoint_commands import evaluate

    report, lines = evaluate(checkpoint)
    answer(report, lines, as_json)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="RUN, RUN@best, RUN@STEP, or the folder of a drafter")],
    b: Annotated[str, typer.Argument(metavar="B", help="likewise; a folder is measured on the other's prompts")],
    as_json: JsonOption = False,
) -> None:
    """Whether B is accepted more than A: prompt by prompt on the same held-out prompts, with an interval."""
    from launch.checkpoint_commands import compare as compare_two

    report, lines = compare_two((a, b))
    answer(report, lines, as_json)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="RUN, RUN@best or RUN@STEP")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder for config.json, model.safetensors, README.md")],
    form: Annotated[str, typer.Option("--format", metavar="zlab|speculators", help="whose layout")] = "zlab",
) -> None:
    """Write a checkpoint in z-lab's or speculators' format, at any time, also in the middle of a run."""
    from launch.checkpoint_commands import export_checkpoint

    if form not in ("zlab", "speculators"):
        raise RequestError(f"--format {form}: write zlab or speculators")
    export_checkpoint(checkpoint, out, "zlab" if form == "zlab" else "speculators")
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
    answer(report, lines, as_json)
    raise typer.Exit(0 if sound else 1)


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
