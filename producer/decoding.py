"""How answers are made: limits, sampling, thinking, and which turns. No torch here."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from protocol.errors import RequestError
from protocol.keyed import words

# Sets these draws apart from every other draw with the same seed.
_SAMPLING = 11


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature` 0 is greedy. `top_p`: the likeliest tokens of this share of all probability; `top_k`: so many
    tokens at most, 0 all. `seed` keys the draws of each row, whatever runs beside it."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


GREEDY = Sampling()


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one `draftwire generate`. `turns`: the last answer of a conversation, or each of them in turn.
    `thinking` None leaves it to the data source. `with_tokens` keeps token ids."""

    max_new_tokens: int = 256
    sampling: Sampling = GREEDY
    turns: Literal["last", "each"] = "last"
    thinking: Literal["on", "off"] | None = None
    with_tokens: bool = False

    def described(self) -> dict[str, Any]:
        """What stands in each line of the output."""
        sampled = msgspec.to_builtins(self.sampling) if self.sampling.temperature else {"temperature": 0.0}
        return {"max_new_tokens": self.max_new_tokens, **sampled}


def check_decoding(decoding: Decoding) -> None:
    """Raises RequestError, with the option and the remedy, for values that cannot be used or have no effect."""
    sampling = decoding.sampling
    if not 0 <= sampling.temperature < math.inf:
        raise RequestError(f"--temperature {sampling.temperature}: write 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"--top-p {sampling.top_p}: write a share above 0, at most 1")
    if sampling.top_k < 0 or not 0 <= sampling.seed < 2**48:
        raise RequestError("--top-k and --seed: write 0 or more, the seed below 2**48")
    if sampling.temperature == 0 and sampling != GREEDY:
        raise RequestError("--top-p, --top-k and --seed have no effect on greedy answers: set --temperature too")
    if decoding.with_tokens and decoding.turns == "each":
        raise RequestError("--tokens goes with --turns last: ids are those of one prompt and its answer")


def row_seed(sampling: Sampling, row: int, turn: int) -> int:
    """The seed of answer `turn` of usable row `row`, below 2**31."""
    return int(words(1, _SAMPLING, sampling.seed, row, turn)[0] >> 33)


def decoding_of(
    max_new_tokens: int, sampling: dict[str, float], turns: str, thinking: str | None, with_tokens: bool
) -> Decoding:
    """The settings that the command line names. Raises RequestError for a word that is none."""
    if turns not in ("last", "each"):
        raise RequestError(f"--turns {turns}: write last or each")
    if thinking not in (None, "on", "off"):
        raise RequestError(f"--thinking {thinking}: write on or off")
    named = {"turns": turns, "thinking": thinking, "with_tokens": with_tokens}
    decoding = msgspec.convert({"max_new_tokens": max_new_tokens, "sampling": sampling, **named}, Decoding)
    check_decoding(decoding)
    return decoding
