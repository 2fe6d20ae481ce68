"""Whether a configuration fits a machine, for a target whose weights need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from launch.config import Config
from launch.site import Site, anywhere, fit, what_would_fit
from launch.sizes import loaded_bytes
from launch.start import Outline
from producer.kernels import kernel_notes
from producer.locate import feature_dtype
from producer.precision import check_precision
from producer.weights import Basis, counted_parameters, has_weights
from protocol.block import CARRIERS
from protocol.errors import RequestError

_GUESSED = "the weights are not here, and this transformers does not build this family: their size is a guess"


class Fitted(msgspec.Struct, frozen=True):
    """What a run will be on `site`: `anywhere` in place of a machine without GPUs that cannot hold it."""

    found: Outline
    site: Site
    weights_from: Basis
    notes: list[str]


class Target(msgspec.Struct, frozen=True):
    """A target's folder, facts and size: the numbers of its weights, in the dtype that they run in."""

    folder: Path
    facts: dict[str, Any]
    parameters: int
    weights_from: Basis


def measured_target(config: Config, folder: Path, facts: dict[str, Any]) -> Target:
    """The target in `folder` with its size; quantised weights keep their own."""
    if not has_weights(folder):
        return Target(folder, facts, *counted_parameters(folder, config.target.trust_remote_code))
    dtype = feature_dtype(config.target, facts, "cuda:0")
    return Target(folder, facts, loaded_bytes(folder, facts, dtype) // CARRIERS[dtype].itemsize, "files")


def fitted(config: Config, target: Target, site: Site) -> Fitted:
    """The outline of the run. Raises RequestError for what cannot work, and says what would fit in place of too small
    cards."""
    folder, facts, parameters = target.folder, target.facts, target.parameters

    def fits(config: Config, site: Site) -> bool:
        try:
            fit(config, folder, facts, parameters, site)
        except RequestError:
            return False
        return True

    notes = [_GUESSED] if target.weights_from == "estimate" else []
    elsewhere = anywhere(config.gpus)
    try:
        found = fit(config, folder, facts, parameters, site)
    except RequestError as refused:
        # What fails without limits too is no matter of memory.
        if not fits(config, elsewhere):
            raise
        if site.gpus:
            advice = what_would_fit(config, site, fits)
            raise RequestError(f"{refused}{'; ' if advice else ''}{advice}") from None
        site, notes = elsewhere, [*notes, f"not on this machine: {refused}; --gpu plans for another one"]
        found = fit(config, folder, facts, parameters, site)
    if site.here and target.weights_from == "files":
        check_precision(folder, found.placement.producers[0])
    # Which kernels are installed here says nothing of another machine.
    of_this_machine = () if site.here else kernel_notes(folder)
    said = [note for note in found.notes if note not in of_this_machine]
    return Fitted(found, site, target.weights_from, [*notes, *said])
