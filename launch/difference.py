"""What two configurations have apart, key by key: printed when a run goes on or forks with another one."""

from __future__ import annotations

from typing import Any


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines "section.key: old -> new", sorted; a key that only one side has shows as "nothing" on the other."""
    flat_then, flat_now = _flat(then), _flat(now)
    return [
        f"{key}: {flat_then.get(key, 'nothing')!r} -> {flat_now.get(key, 'nothing')!r}"
        for key in sorted(flat_then.keys() | flat_now.keys())
        if flat_then.get(key) != flat_now.get(key)
    ]


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
