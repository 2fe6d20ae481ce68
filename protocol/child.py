"""How every child process begins and ends.

It dies with its launcher, leaves terminal signals to it, logs with its own name, and turns the errors that draftwire
raises on purpose into one line and an exit code.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from protocol.errors import DraftwireError, FinalError, RequestError

ERROR_PREFIX = "error: "
# Exit codes after which a child is not started again: the next one would end in the same way.
WRONG_REQUEST, FAILED_FOR_GOOD = 2, 3
LAUNCHER_VARIABLE = "DRAFTWIRE_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
# A full disk and a full quota are the machine's, and a traceback would add nothing.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_child(name: str, body: Callable[[], None]) -> None:
    """Runs `body` as the child `name` and exits: 0 done, 1 failed, 2 wrong request, 3 failed for good.

    The last line of a failed child's log is "error: ..." for an expected error; anything unexpected keeps its
    traceback.
    """
    _die_with_parent()
    # Ctrl-C reaches the whole foreground group; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(message)s", stream=sys.stdout, force=True)
    try:
        body()
    except (DraftwireError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        if isinstance(error, OSError) and not full:
            logging.exception("unexpected, but it may be the machine's and not ours")
        print(f"{ERROR_PREFIX}{'there is no room left to write to: ' if full else ''}{error}")
        _leave(_exit_code(error))
    except Exception:
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends without the interpreter's own end: threads that are still at work in C++ by then would abort it, and the
    launcher would see SIGABRT where the code says why."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(error: DraftwireError | OSError) -> int:
    match error:
        case RequestError():
            return WRONG_REQUEST
        case FinalError():
            return FAILED_FOR_GOOD
    return 1


def _die_with_parent() -> None:
    # Not getppid() by itself: a launcher that died while this process imported torch is no longer its parent.
    die_with(int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid()))


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent, which has the id `parent`, dies, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was made
        os.kill(os.getpid(), signal.SIGKILL)
