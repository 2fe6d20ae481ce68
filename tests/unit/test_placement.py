"""[gpus]: which device each process gets, and which requests are refused with the reason."""

from __future__ import annotations

import pytest

from launch.machine import Gpu
from launch.placement import GpusConfig, Placement, place, show_placement
from protocol.errors import RequestError


def cuda(*indices: int) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in indices)


@pytest.mark.parametrize(
    ("split", "gpus", "producers", "consumers"),
    [
        ("3:1", 4, cuda(0, 1, 2), cuda(3)),
        ("2:2", 4, cuda(0, 1), cuda(2, 3)),
        ("1:1", 4, cuda(0), cuda(1)),  # fewer than there are
        ("auto", 8, cuda(0, 1, 2, 3), cuda(4, 5, 6, 7)),
        ("auto", 3, cuda(0), cuda(1, 2)),  # the consumers get the odd one
        ("auto", 2, cuda(0), cuda(1)),
        ("auto", 1, cuda(0), cuda(0)),
        ("shared", 1, cuda(0), cuda(0)),
        ("shared", 4, cuda(0), cuda(0)),
        ("auto", 0, ("cpu",), ("cpu",)),
        ("shared", 0, ("cpu",), ("cpu",)),
        ("2:3", 0, ("cpu",) * 2, ("cpu",) * 3),
    ],
)
def test_split(split: str, gpus: int, producers: tuple[str, ...], consumers: tuple[str, ...]) -> None:
    assert place(GpusConfig(split=split), gpus) == Placement(producers, consumers)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_auto_uses_every_gpu_once(gpus: int) -> None:
    placement = place(GpusConfig(), gpus)
    assert placement.producers + placement.consumers == cuda(*range(gpus))
    assert placement.producers


@pytest.mark.parametrize(
    ("split", "gpus", "problem"),
    [
        ("4:0", 4, "4:0 leaves one role without a process"),
        ("60:5", 0, "60:5 asks for 65 processes on the CPU, where 64 are the most"),
        ("99999999999999999999:1", 0, "is not understood"),
        ("0:4", 4, "0:4 leaves one role without a process"),
        ("0:1", 0, "0:1 leaves one role without a process"),
        ("3:2", 4, "3:2 needs 5 GPUs, 4 are visible"),
        ("1:1", 1, "1:1 needs 2 GPUs, 1 are visible"),
        ("3+1", 4, r"'3\+1' is not understood; write auto, shared or e.g. 3:5"),
        ("3:1:2", 4, "is not understood"),
        ("-1:2", 4, "is not understood"),
        ("3:1 ", 4, "is not understood"),
        ("", 4, "is not understood"),
    ],
)
def test_an_impossible_split_is_refused_with_the_reason(split: str, gpus: int, problem: str) -> None:
    with pytest.raises(RequestError, match=rf"^gpus\.split: .*{problem}"):
        place(GpusConfig(split=split), gpus)


@pytest.mark.parametrize(
    ("config", "gpus", "producers", "consumers"),
    [
        (GpusConfig(split="4:2"), 8, [cuda(0, 1), cuda(2, 3)], cuda(4, 5)),
        (GpusConfig(), 8, [cuda(0, 1), cuda(2, 3)], cuda(4, 5, 6, 7)),
        (GpusConfig(), 7, [cuda(0, 1)], cuda(2, 3, 4, 5, 6)),  # a producer takes two or none
        (GpusConfig(), 3, [cuda(0, 1)], cuda(2)),
        (GpusConfig(producers=[5, 2, 0, 1], consumers=[3]), 6, [cuda(5, 2), cuda(0, 1)], cuda(3)),
        (GpusConfig(), 0, [("cpu", "cpu")], ("cpu",)),
        (GpusConfig(split="shared"), 0, [("cpu", "cpu")], ("cpu",)),
        (GpusConfig(split="4:1"), 0, [("cpu", "cpu")] * 2, ("cpu",)),
    ],
)
def test_a_divided_target_takes_its_devices_in_a_row(
    config: GpusConfig, gpus: int, producers: list[tuple[str, ...]], consumers: tuple[str, ...]
) -> None:
    placement = place(config, gpus, 2)
    assert (placement.by_producer, placement.consumers) == (producers, consumers)
    assert placement.peers == len(producers) + len(consumers)


@pytest.mark.parametrize(
    ("config", "gpus", "problem"),
    [
        (GpusConfig(split="3:1"), 4, r"gpus\.split: 3 GPUs for producers of 2 each .*write a multiple, 2 for example"),
        (GpusConfig(split="1:1"), 0, r"gpus\.split: 1 processes for producers of 2 each .*, 2 for example"),
        (GpusConfig(producers=[0, 1, 2], consumers=[3]), 4, r"gpus\.producers: 3 GPUs for producers of 2 each"),
        (GpusConfig(), 2, "a producer takes 2 GPUs .* and a consumer one of its own"),
        (GpusConfig(), 1, "a producer takes 2 GPUs"),
        (GpusConfig(split="shared"), 4, "gpus.split: shared with 4 visible: a producer takes 2 GPUs"),
        (GpusConfig(producers=[0, 1], consumers=[0, 1]), 4, "gpus: cuda:0, cuda:1 in both roles"),
    ],
)
def test_devices_that_a_divided_target_cannot_have_are_refused(config: GpusConfig, gpus: int, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        place(config, gpus, 2)


def test_devices_by_name() -> None:
    assert place(GpusConfig(producers=[3, 0], consumers=[1]), 4) == Placement(cuda(3, 0), cuda(1))


def test_the_same_devices_named_for_both_roles_are_shared() -> None:
    assert place(GpusConfig(producers=[2], consumers=[2]), 4) == Placement(cuda(2), cuda(2))


def test_a_split_beside_named_devices_is_refused() -> None:
    said = r"gpus\.split = '1:1' and the lists gpus\.producers and gpus\.consumers both place"
    for lists in ({"producers": [0], "consumers": [1]}, {"producers": [0]}):
        with pytest.raises(RequestError, match=said):
            place(GpusConfig(split="1:1", **lists), 4)


@pytest.mark.parametrize(
    ("producers", "consumers", "gpus", "problem"),
    [
        ([0, 1], [1, 2], 4, r"device 1 is in both roles; give each role its own, or split = \"shared\""),
        ([0, 1], [1], 4, "device 1 is in both roles"),
        ([0], [4], 4, r"gpus\.consumers: \[4\] is not a set of devices among the 4 visible ones"),
        ([-1], [0], 4, r"gpus\.producers: \[-1\] is not a set"),
        ([0, 0], [1], 4, r"gpus\.producers: \[0, 0\] is not a set"),
        ([0], None, 4, r"both gpus\.producers and gpus\.consumers"),
        (None, [0], 4, r"both gpus\.producers and gpus\.consumers"),
        ([], [0], 4, r"both gpus\.producers and gpus\.consumers"),
        ([0], [1], 0, "among the 0 visible ones"),
    ],
)
def test_impossible_names_are_refused_with_the_reason(
    producers: list[int] | None, consumers: list[int] | None, gpus: int, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        place(GpusConfig(producers=producers, consumers=consumers), gpus)


# --- how the plan is shown -------------------------------------------------------------------------------------------

FOUR_TO_SEVEN = [Gpu("NVIDIA H200", 0, 0, str(4 + at), f"GPU-1a2b{at}-9d-77") for at in range(4)]


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (
            GpusConfig(split="3:1"),
            "producers on cuda:0 (GPU 4, NVIDIA H200, UUID GPU-1a2b0), cuda:1 (GPU 5, NVIDIA H200, UUID GPU-1a2b1), "
            "cuda:2 (GPU 6, NVIDIA H200, UUID GPU-1a2b2); consumers on cuda:3 (GPU 7, NVIDIA H200, UUID GPU-1a2b3)",
        ),
        (
            GpusConfig(producers=[3], consumers=[0]),
            "producers on cuda:3 (GPU 7, NVIDIA H200, UUID GPU-1a2b3); consumers on cuda:0 (GPU 4, NVIDIA H200, "
            "UUID GPU-1a2b0)",
        ),
        (
            GpusConfig(split="shared"),
            "producers on cuda:0 (GPU 4, NVIDIA H200, UUID GPU-1a2b0); consumers on cuda:0 (GPU 4, NVIDIA H200, "
            "UUID GPU-1a2b0); both roles share cuda:0",
        ),
    ],
)
def test_a_placement_names_devices_as_the_config_and_as_the_machine_does(config: GpusConfig, shown: str) -> None:
    assert show_placement(place(config, 4), FOUR_TO_SEVEN) == shown


def test_a_placement_on_the_cpu() -> None:
    assert show_placement(place(GpusConfig(split="2:1"), 0), []) == "producers on cpu, cpu; consumers on cpu"


def test_physical_numbers_in_place_of_visible_ones_are_told_apart() -> None:
    """CUDA_VISIBLE_DEVICES=4,5,6,7 makes 0 to 3 of them."""
    with pytest.raises(RequestError, match=r"\[4, 5\] is not .* 4 visible ones: they count from 0 to 3, whatever"):
        place(GpusConfig(producers=[4, 5], consumers=[6, 7]), 4)


def test_when_nothing_is_computed_every_gpu_trains() -> None:
    alone = place(GpusConfig(), 4, alone=True)
    assert (alone.producers, alone.consumers) == (("cuda:0",), ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    assert alone.alone
    assert place(GpusConfig(), 4, 2, alone=True).producers == ("cuda:0", "cuda:1")
    # A split that somebody asked for, one GPU or none stay as they are.
    assert place(GpusConfig(split="1:3"), 4, alone=True) == place(GpusConfig(split="1:3"), 4)
    assert place(GpusConfig(), 1, alone=True) == place(GpusConfig(), 1)
    assert place(GpusConfig(), 0, alone=True) == place(GpusConfig(), 0)
