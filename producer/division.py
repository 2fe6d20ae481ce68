"""Whether transformers has a plan to divide a target over several devices, and what part of the weights one then holds.

Told by `config.json`, transformers' own plan for that architecture and the headers of the weight files; nothing is
loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from producer.config import TargetConfig
from producer.locate import read_config, stored_sizes
from producer.precision import quantisation
from protocol.errors import RequestError

# Of the styles of transformers' plans, those that leave a parameter whole on every rank.
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "mla_kv_a_proj")
# Whatever is divided by heads or by MLP columns has these.
_DIVIDED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def check_division(folder: Path, config: TargetConfig, facts: Mapping[str, Any]) -> None:
    """Raises RequestError, with the remedy, when `target.tensor_parallel` cannot divide the target in `folder`."""
    ranks = config.tensor_parallel
    if ranks == 1:
        return
    where = f"target.tensor_parallel = {ranks}"
    if (method := quantisation(folder)) is not None:
        raise RequestError(f"{where}: the target is quantised ({method}), which has not been proven in parts; use 1")
    if not _plan(folder, config):
        raise RequestError(f"{where}: transformers has no plan to divide the layers of {facts['model_type']}; use 1")
    sizes = read_config(folder) | {key: facts[key] for key in _DIVIDED_SIZES if key in facts}
    divided = {key: sizes[key] for key in _DIVIDED_SIZES if isinstance(sizes.get(key), int)}
    for key, size in divided.items():
        if size % ranks:
            fits = [str(count) for count in range(1, 17) if not any(size % count for size in divided.values())]
            raise RequestError(f"{where} does not divide the target's {key} = {size}; use one of {', '.join(fits)}")


def elsewhere_bytes(folder: Path, config: TargetConfig) -> int:
    """Bytes of the stored weights that a device of a producer need not hold, because its other devices do; at least.
    What the plan divides in the decoder layers counts. Embedding and head do not, which only some releases divide."""
    if config.tensor_parallel == 1:
        return 0
    divided = re.compile("|".join(_patterns(_plan(folder, config))))
    sizes = [size for name, size in stored_sizes(folder).items() if divided.search(name)]
    return sum(sizes) * (config.tensor_parallel - 1) // config.tensor_parallel


def _plan(folder: Path, config: TargetConfig) -> dict[str, str]:
    """What transformers divides in the decoder layers, by module or parameter; `*` stands for a layer's number."""
    import transformers  # only who divides a target needs it here

    auto: Any = transformers.AutoConfig
    try:
        found = auto.from_pretrained(folder, trust_remote_code=config.trust_remote_code, local_files_only=True)
    except ValueError as refused:
        raise RequestError(f"{folder}: transformers cannot load it: {str(refused).splitlines()[0]}") from None
    plan = getattr(found.get_text_config(), "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if name.startswith("layers.") and style not in _WHOLE}


def _patterns(plan: Mapping[str, str]) -> Iterator[str]:
    """For the name of each planned module or parameter, and of what lies in it: files may hold experts one by one."""
    for name in plan:
        yield r"(?:^|\.)" + re.escape(name).replace(r"\*", r"\d+") + r"(?:\.|$)"
