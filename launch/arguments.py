"""What the commands of the command line share: their arguments, and how they answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.metrics import to_json

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="a TOML config (docs/configuration.md)")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="override one key; repeatable")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]


def say(line: str) -> None:
    print(line, flush=True)


def hint(line: str) -> None:
    """Progress of a command whose stdout is its answer."""
    print(line, file=sys.stderr, flush=True)


def answer(report: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """The result of a command, for people or as one JSON object."""
    if as_json:
        say(to_json(report))
        return
    for line in lines:
        say(line)
