"""transformers without its progress bars and advice: draftwire says itself what goes on, a line a thing."""

from __future__ import annotations

from typing import Any

import transformers


def hush() -> None:
    """Errors still come through."""
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
