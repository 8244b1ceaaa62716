"""The sampling rules that an opener may wish for a session, and what values they may have.

Invariant: a rule that no engine could carry out is refused when the session is opened, where its
author reads it, never call by call before the agent. Ranges: SGLang's SamplingParams.verify. Driven
by admin.py.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.types import EVAL_SAMPLING, SamplingPolicy, SamplingRule

Wish = Literal["train", "eval"] | dict[str, SamplingRule]
"""Training's rules, evaluation's, or rules by field over training's."""

Number = float | int
_Range = tuple[str, Callable[[Number], bool]]

_RANGES: Mapping[str, _Range] = {
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("-1 or a whole number from 1", lambda value: value == -1 or _counts(value)),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "max_tokens": ("a whole number from 1", lambda value: _counts(value)),
    "seed": ("a whole number", lambda value: value == int(value)),
}
"""Of the fields whose rules have a value; the others are only let through or not."""


def policy_of(wish: Wish, training: SamplingPolicy) -> SamplingPolicy:
    """The session's policy; SessionError 400 names the field and what it may be."""
    if wish == "train":
        return training
    if wish == "eval":
        return EVAL_SAMPLING
    for name, rule in wish.items():
        if name not in SamplingPolicy.__struct_fields__:
            raise _refusal(name, f"no such field; {', '.join(SamplingPolicy.__struct_fields__)}")
        _check(name, rule.value)
    return msgspec.structs.replace(training, **wish)


def _check(name: str, value: Number | None) -> None:
    if value is None:
        return
    if name not in _RANGES:
        raise _refusal(name, "takes no value; forced means none")
    told, fits = _RANGES[name]
    if not fits(value):
        raise _refusal(name, f"{value:g} is not {told}")


def _counts(value: Number) -> bool:
    return value >= 1 and value == int(value)


def _refusal(name: str, why: str) -> SessionError:
    return SessionError(400, "invalid_body", f"sampling.{name}: {why}")
