"""What this machine's CPU can do; both sides choose their default dtype by it."""

from __future__ import annotations

from pathlib import Path


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AMX or AVX512-BF16 on x86, BF16 on Arm)."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})
