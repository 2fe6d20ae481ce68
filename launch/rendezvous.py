"""How the ranks of one start find each other."""

from __future__ import annotations

import socket


def ranks_environment(consumers: int) -> dict[str, str]:
    """The environment that torchrun would give, so that consumers find each other; only several need it."""
    if consumers < 2:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"WORLD_SIZE": str(consumers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
