"""Memory is registered once, given back once, and a refusal is told and cleared, not raised."""

from __future__ import annotations

import pytest

from protocol.pinning import pinned


class Runtime:
    """Stands for the CUDA runtime: answers `code` to a registration."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, []  # type: tuple[int, list[tuple[object, ...]]]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes))
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append(("unregister", address))


def test_memory_is_given_back_in_the_end() -> None:
    runtime = Runtime(0)
    with pinned(runtime, 4096, 100, "the ring", lambda: pytest.fail("nothing to clear")):
        assert runtime.calls == [("register", 4096, 100)]
    assert runtime.calls[1:] == [("unregister", 4096)]


def test_a_refusal_is_told_and_cleared(caplog: pytest.LogCaptureFixture) -> None:
    runtime, cleared = Runtime(2), []

    def any_kernel() -> None:
        cleared.append(True)
        raise RuntimeError("the runtime's last error")

    with pinned(runtime, 4096, 100, "the ring", any_kernel):
        assert cleared
    assert [call[0] for call in runtime.calls] == ["register"]
    assert "the ring cannot be pinned: CUDA refuses 100 bytes" in caplog.text
