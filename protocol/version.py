"""Versions: of draftwire, and of the protocol its processes speak."""

from __future__ import annotations

DRAFTWIRE_VERSION = "0.1.0"

# Raised whenever a message, the block layout or the slot layout changes. Processes of one run always come from one
# checkout, so there is no range: a peer with another number is refused at HELLO.
PROTOCOL_VERSION = 5
