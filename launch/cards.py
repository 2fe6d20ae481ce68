"""GPUs by the names that `draftwire plan --gpu` takes, for plans of machines that are not at hand. Pure.

Memory is what nvidia-smi reports of such a card, all of it taken as free.
"""

from __future__ import annotations

import difflib

from launch.machine import Gpu
from protocol.errors import RequestError

MOST_CARDS = 64
# Short name -> nvidia-smi's name and MiB, smallest first.
_CARDS: dict[str, tuple[str, int]] = {
    "a10-24": ("NVIDIA A10", 23_028),
    "l4-24": ("NVIDIA L4", 23_034),
    "rtx4090-24": ("NVIDIA GeForce RTX 4090", 24_564),
    "rtx5090-32": ("NVIDIA GeForce RTX 5090", 32_607),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 40_960),
    "l40s": ("NVIDIA L40S", 46_068),
    "h100-80": ("NVIDIA H100 80GB HBM3", 81_559),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 81_920),
    "h100-nvl-94": ("NVIDIA H100 NVL", 95_830),
    "h20-96": ("NVIDIA H20", 97_871),
    "gh200-96": ("NVIDIA GH200 480GB", 97_871),
    "rtx6000-96": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887),
    "h200": ("NVIDIA H200", 143_771),
    "b200": ("NVIDIA B200", 183_359),
}


def card(name: str) -> Gpu:
    """The GPU of that short name. Raises RequestError with the names that there are."""
    if name not in _CARDS:
        beginning = [known for known in _CARDS if known.startswith(name.lower())] if name else []
        close = beginning or difflib.get_close_matches(name.lower(), _CARDS, n=1, cutoff=0.4)
        near = f"did you mean {' or '.join(close)}? " if close else ""
        raise RequestError(f"--gpu {name}: {near}known are {', '.join(_CARDS)}")
    full_name, mib = _CARDS[name]
    return Gpu(full_name, mib << 20, mib << 20)


def larger_cards(total_bytes: int) -> list[tuple[str, Gpu]]:
    """The cards with more memory than `total_bytes`, smallest first, with their short names."""
    return [(name, card(name)) for name, (_, mib) in _CARDS.items() if mib << 20 > total_bytes]
