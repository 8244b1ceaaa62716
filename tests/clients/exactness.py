"""Check that a session's samples are exactly the engine's input and output, token for token.

The scripted model is a function of its context, so the engine's requests determine all of its
answers; the check trusts nothing that the gateway recorded.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rollmesh.testing.engine import ScriptedAgent, ScriptedEngine, logprob_of


class Call(NamedTuple):
    """One turn as the engine saw it."""

    prompt: list[int]
    answer: list[int]

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.answer


def calls_of(engine: ScriptedEngine, agent: ScriptedAgent) -> list[Call]:
    """The engine's requests, in order, each with its model's answer.

    A turn that was cut and resumed is one call: its remainder ends as the whole would have.
    """
    calls: dict[tuple[int, ...], Call] = {}
    for request in engine.seen:
        if request.path != "/generate":
            continue
        prompt, sampling = request.body["input_ids"], request.body["sampling_params"]
        if sampling["max_new_tokens"] == 0:
            continue
        answer: list[int] = []
        while len(answer) < sampling["max_new_tokens"]:
            answer.append(agent.next_token(0, prompt + answer))
            if answer[-1] in sampling["stop_token_ids"]:
                break
        calls.setdefault((*prompt, *answer), Call(prompt, answer))
    return list(calls.values())


def num_extending(calls: Sequence[Call]) -> int:
    """The number of calls whose prompt begins with all tokens, sampled ones too, of an earlier
    call.
    """
    return sum(
        any(call.prompt[: len(before.whole)] == before.whole for before in calls[:n])
        for n, call in enumerate(calls)
    )


def faults(
    calls: Sequence[Call], samples: Sequence[dict[str, Any]], agent: ScriptedAgent
) -> list[str]:
    """One line for each fault; empty if all is exact."""
    found = [*_unproven(samples, agent)]
    for n, call in enumerate(calls):
        begin, end = len(call.prompt), len(call.whole)
        masks = [
            sample["loss_mask"][begin:end]
            for sample in samples
            if sample["token_ids"][:end] == call.whole
        ]
        if not masks:
            found.append(f"call {n}: no sample begins with its prompt and answer")
            continue
        trained = [sum(map(bool, mask)) for mask in masks]
        if sorted(trained) != [0] * (len(masks) - 1) + [end - begin]:
            found.append(f"call {n}: of {end - begin} sampled tokens its samples train {trained}")
    num_trained = sum(sum(map(bool, sample["loss_mask"])) for sample in samples)
    num_sampled = sum(len(call.answer) for call in calls)
    if num_trained != num_sampled:
        found.append(f"{num_trained} tokens train, {num_sampled} were sampled")
    return found


def _unproven(samples: Sequence[dict[str, Any]], agent: ScriptedAgent) -> Iterable[str]:
    """Trained tokens that the model does not sample there, or not with that log-prob."""
    for n, sample in enumerate(samples):
        ids, logprobs, mask = sample["token_ids"], sample["logprobs"], sample["loss_mask"]
        if not len(ids) == len(logprobs) == len(mask) == len(sample["policy_versions"]):
            yield f"sample {n}: its arrays differ in length"
            continue
        for at in range(len(ids)):
            if not mask[at]:
                continue
            if ids[at] != agent.next_token(0, ids[:at]):
                yield f"sample {n}, token {at}: not what the model says there"
                break
            if logprobs[at] != logprob_of(0, ids[at]):
                yield f"sample {n}, token {at}: log-prob {logprobs[at]}, not the engine's"
                break
