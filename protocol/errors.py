"""The exception tree.

DraftwireError
├── RequestError    the request is wrong: nothing was started, exit code 2
├── RunError        the run failed: exit code 1
│   └── FinalError  and would fail again: a child ends with code 3 and is not started again
└── ProtocolError   a peer, a message or a layout is not what the contract says
    └── Refused     this peer may not join, and trying again will not help
"""

from __future__ import annotations


class DraftwireError(Exception):
    """Base of everything that draftwire raises on purpose; `str(error)` is one line for a person."""


class RequestError(DraftwireError):
    """The user's request cannot be carried out: names the file, line or field and what to do."""


class RunError(DraftwireError):
    """A run failed: names the process, the reason and where its log is."""


class FinalError(RunError):
    """A process failed in a way that a new start of it would not mend: there is no room on the disk, say."""


class ProtocolError(DraftwireError):
    """A peer, a message or a memory layout breaks the contract of docs/protocol.md."""


class Refused(ProtocolError):
    """The answer to HELLO was REJECT: names the reason that came with it."""
