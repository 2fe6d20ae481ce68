"""`draftwire cache build|ls|verify|prune`, said by the command line of launch/cli.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.metrics import to_json
from protocol.errors import RequestError

app = typer.Typer(
    help="The disk cache of features: what it holds, whether it is sound, making room in it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a cache (cache.dir)")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]


@app.command()
def build(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a TOML config (docs/configuration.md)")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="override one key; repeatable")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute what the cache of a config lacks, without training; resumable."""
    from rich.console import Console

    from launch.cache_build import build_cache
    from launch.config import load_config
    from launch.live import Screen
    from launch.signals import Interrupted

    try:
        # Its stdout is the answer.
        with Screen(Console(stderr=True, highlight=False, soft_wrap=True)) as screen:
            report, lines = build_cache(load_config(config, set_ or ()), screen)
    except Interrupted:
        _hint("interrupted; whole shards stay, and the same command goes on")
        raise typer.Exit(130) from None
    _answer(report, lines, as_json)


@app.command("ls")
def list_(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """What a cache holds, how much of it, and what it was made with."""
    from launch.cache_commands import list_cache

    _answer(*list_cache(folder), as_json)


@app.command()
def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Read every byte of a cache and compare it with its checksum; exit code 1 when something is damaged."""
    from launch.cache_commands import verify_cache

    report, lines = verify_cache(folder, _hint)
    _answer(report, lines, as_json)
    raise typer.Exit(1 if report["damaged"] else 0)


@app.command()
def prune(
    folder: FolderArgument,
    max_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="keep at most this much: 500GB")] = None,
    unused_since: Annotated[str | None, typer.Option(metavar="TIME", help="delete what is unused so long: 30d")] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the longest unused shards. Nothing else ever deletes from a cache."""
    from launch.cache_commands import prune_cache
    from protocol.units import parse_bytes, parse_seconds

    if max_bytes is None and unused_since is None:
        raise RequestError("cache prune: say --max-bytes, --unused-since or both")
    most = parse_bytes(max_bytes, "--max-bytes") if max_bytes is not None else None
    unused_s = parse_seconds(unused_since, "--unused-since") if unused_since is not None else None
    _answer(*prune_cache(folder, most, unused_s, _hint), as_json)


def _hint(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _answer(report: dict[str, Any], lines: list[str], as_json: bool) -> None:
    for line in [to_json(report)] if as_json else lines:
        print(line, flush=True)
