"""The check of samples: it accepts exact samples, and names each fault."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.engine import ScriptedAgent, logprob_of
from tests.clients.exactness import Call, faults, num_extending
from tests.clients.script import task
from tests.clients.tasks import model_folder

FIRST = "<|im_start|>system\n<tools><|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nnotes.txt<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(model_folder(tmp_path))


@pytest.fixture
def agent(tokenizer: Tokenizer) -> ScriptedAgent:
    return ScriptedAgent(tokenizer, task())


@pytest.fixture
def calls(agent: ScriptedAgent, tokenizer: Tokenizer) -> list[Call]:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found: list[Call] = []
    prompt: list[int] = []
    for text in (FIRST, NEXT):
        prompt = [*prompt, *tokenizer.encode(text)]
        answer: list[int] = []
        while answer[-1:] != [end]:
            answer.append(agent.next_token(0, prompt + answer))
        found.append(Call(prompt, answer))
        prompt = found[-1].whole
    return found


def sample_of(calls: list[Call]) -> dict[str, Any]:
    """The last call's path, on which both answers train."""
    ids = calls[-1].whole
    mask = [0] * len(ids)
    for call in calls:
        mask[len(call.prompt) : len(call.whole)] = [1] * len(call.answer)
    return {
        "token_ids": list(ids),
        "logprobs": [logprob_of(0, i) if m else 0.0 for i, m in zip(ids, mask, strict=True)],
        "loss_mask": mask,
        "policy_versions": [0 if m else -1 for m in mask],
    }


def test_an_exact_sample_has_no_fault(agent: ScriptedAgent, calls: list[Call]) -> None:
    assert faults(calls, [sample_of(calls)], agent) == []
    assert num_extending(calls) == 1


def test_an_answer_that_trains_twice_or_never_is_a_fault(
    agent: ScriptedAgent, calls: list[Call]
) -> None:
    whole, part = sample_of(calls), sample_of(calls[:1])
    assert any("its samples train" in line for line in faults(calls, [whole, part], agent))
    num = len(calls[0].answer)
    whole["loss_mask"] = [0] * len(calls[1].prompt) + [1] * len(calls[1].answer)
    assert f"call 0: of {num} sampled tokens its samples train [0]" in faults(calls, [whole], agent)


def test_a_changed_token_log_prob_or_mask_is_a_fault(
    agent: ScriptedAgent, calls: list[Call]
) -> None:
    at = len(calls[0].prompt)
    sample = sample_of(calls)
    sample["token_ids"][at] += 1
    assert (
        faults(calls, [sample], agent)[0] == f"sample 0, token {at}: not what the model says there"
    )
    sample = sample_of(calls)
    sample["logprobs"][at] -= 0.5
    assert faults(calls, [sample], agent)[0].startswith(f"sample 0, token {at}: log-prob")
    sample = sample_of(calls)
    sample["loss_mask"][0] = 1
    assert any(line.endswith("were sampled") for line in faults(calls, [sample], agent))


def test_a_prompt_that_was_rendered_again_is_a_fault(
    agent: ScriptedAgent, calls: list[Call], tokenizer: Tokenizer
) -> None:
    again = tokenizer.encode(tokenizer.decode(calls[1].prompt))
    assert again != calls[1].prompt
    drifted = [calls[0], Call(again, calls[1].answer)]
    assert num_extending(drifted) == 0
    found = faults(drifted, [sample_of(calls)], agent)
    assert "call 1: no sample begins with its prompt and answer" in found
