"""What one call samples: the lead behind its prompt, and the parameters of each of its choices.

Owns the bounds that a call keeps to: the model's context and its vocabulary. Invariants: a lead is
part of the prompt wherever prompt tokens are counted; choices differ in nothing but their seeds.
Pure; driven by session.py.
"""

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.types import FieldPolicy, SamplingParams
from rollmesh.runtime.kit import SessionAsk, SessionKit
from rollmesh.runtime.sampling import derive_seed, resolve
from rollmesh.runtime.turns import Turn


class Plan(msgspec.Struct, frozen=True):
    """See the module."""

    lead: tuple[int, ...]
    choices: tuple[SamplingParams, ...]


def lead_of(turn: Turn, ask: SessionAsk, kit: SessionKit) -> tuple[int, ...]:
    """Tokens that stand behind the prompt as context; none behind a raw one."""
    if turn.is_raw or (turn.ask.grammar is None and turn.tool_choice.kind == "auto"):
        return ()
    is_free = ask.sampling.grammar.policy is not FieldPolicy.FORCE
    grammar = turn.ask.grammar if is_free else None
    return kit.prompts.lead(turn.tool_choice, grammar, turn.tools)


def plan_of(turn: Turn, num_prompt: int, call: int, ask: SessionAsk, kit: SessionKit) -> Plan:
    """What to sample behind `num_prompt` tokens, as the session's calls from number `call` on.

    SessionError 400 where the context is full, or a token is none of the model's.
    """
    prompts, max_tokens = kit.prompts, kit.max_context_tokens
    lead = lead_of(turn, ask, kit)
    num_prompt += len(lead)
    if num_prompt >= max_tokens:
        raise SessionError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {max_tokens} tokens. "
            f"However, your messages resulted in {num_prompt} tokens.",
        )
    bias = turn.ask.logit_bias
    if bias and not all(0 <= token_id < prompts.vocab_size for token_id, _ in bias):
        why = f"logit_bias: expected token ids from 0 to {prompts.vocab_size - 1}"
        raise SessionError(400, "invalid_logit_bias", why)
    ends = prompts.stop_token_ids
    if turn.reads_calls and not turn.parallel_calls:
        ends = (*ends, *prompts.call_end_ids)
    choices = [
        resolve(
            ask.sampling,
            turn.ask,
            room_tokens=max_tokens - num_prompt,
            derived_seed=derive_seed(ask.seed, ask.rollout_id.index, call + choice),
            stop_token_ids=ends,
            choice=choice,
        )
        for choice in range(turn.num_choices)
    ]
    return Plan(lead, tuple(choices))
