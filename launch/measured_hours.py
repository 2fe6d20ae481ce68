"""How long a run will take, from what `draftwire tune` measured of this configuration on this machine. Pure."""

from __future__ import annotations

from launch.corpus import Corpus
from launch.hours import Hours
from launch.measurements import Measurements
from launch.placement import Placement
from launch.split_model import Split
from launch.splits import ranked, table
from protocol.errors import RequestError


def measured_hours(measured: Measurements, placement: Placement, corpus: Corpus, passes: float) -> Hours | None:
    """Of `passes` over the corpus with this placement; None where nothing like it was measured, or it does not fit."""
    split = split_of(placement)
    try:
        rows = table(measured, split.producers + (0 if split.shared else split.consumers))
    except RequestError:
        return None  # of no such number of GPUs
    row = next((each for each in rows if each.split == split), None)
    if row is None or row.lacking:
        return None
    tokens = passes * corpus.tokens
    producer, consumer, total = (
        tokens / rate / 3600 for rate in (row.producers_alone, row.trainers_alone, row.tokens_per_s)
    )
    return Hours(producer, consumer, total, "measured")


def measured_by_split(measured: Measurements, gpus: int, tensor_parallel: int, corpus: Corpus) -> dict[str, float]:
    """Hours of one pass with each "P:C" of so many GPUs that fits, the quickest first."""
    try:
        rows = ranked(table(measured, gpus))
    except RequestError:
        return {}
    return {
        f"{row.split.producers}:{row.split.consumers}": corpus.tokens / row.tokens_per_s / 3600
        for row in rows
        if not row.split.shared and row.split.tensor_parallel == tensor_parallel
    }


def split_of(placement: Placement) -> Split:
    """The split that a placement is; processes on CPUs have no device that they could share."""
    own = placement.producers
    shared = "cpu" not in own and bool(set(own) & set(placement.consumers))
    return Split(len(own), len(placement.consumers), placement.tensor_parallel, shared)
