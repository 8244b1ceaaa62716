"""Recorded log-probs equal those of transformers, however requests share a step."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rollmesh.engine.embedded.engine import PauseMode
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import Request
from rollmesh.engine.embedded.runner import padding
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, random_prompt
from tests.unit.engine.embedded.references import Reference
from tests.unit.engine.embedded.tiny_models import write_model

TOLERANCE = 1e-4


def worst_gap(reference: Reference, request: Request) -> float:
    """The largest difference between a recorded log-prob and transformers' one."""
    tokens = request.tokens[: request.num_tokens].tolist()
    gaps = [0.0]
    if request.num_output_tokens:
        expected = reference.logprobs(tokens, request.sampling.temperature or 1.0)
        sampled = expected[request.num_prompt_tokens - 1 :]
        gaps.append(float(np.abs(np.subtract(sampled, request.logprobs)).max()))
    if request.prompt_logprobs:
        expected = reference.logprobs(tokens[: request.num_prompt_tokens])
        scored = expected[request.logprob_start :]
        gaps.append(float(np.abs(np.subtract(scored, request.prompt_logprobs)).max()))
    return max(gaps)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_recorded_logprobs_are_those_of_transformers_in_every_mixture(
    tmp_path: Path, family: str
) -> None:
    folder = write_model(tmp_path, family, seed=11)
    # Chunks of 24 tokens and little memory: prompts are cut, siblings share, some are retracted.
    engine = make_engine(Model(folder, torch.float32), num_slots=400, max_step_tokens=24)
    rng = np.random.default_rng(2)
    common = random_prompt(60, seed=9)
    requests = []
    for at in range(30):
        prompt = common[: rng.integers(0, 60)] + random_prompt(int(rng.integers(1, 40)), seed=at)
        request = ask(
            prompt,
            rid=str(at),
            new=int(rng.integers(1, 20)),
            seed=at,
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.0])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 5])),
            logprob_start=(None, None, 0, 7)[at % 4],
        )
        requests.append(request)
        engine.submit(request)
        if at % 3 == 0:
            engine.step()
        if at == 15:
            engine.pause(PauseMode.RETRACT)
            engine.resume()
    finish_all(engine)
    reference = Reference(folder)
    assert max(worst_gap(reference, request) for request in requests) < TOLERANCE
    num_tokens = sum(request.num_tokens for request in requests)
    assert engine.runner.num_computed_tokens < num_tokens, "prefixes were reused"
    assert any(request.num_retractions for request in requests)


def test_prefix_reuse_changes_no_logprob(model: Model, folder: Path) -> None:
    prompt = random_prompt(50)
    engine = make_engine(model)
    first, second = ask(prompt, "1", seed=4), ask(prompt, "2", seed=4)
    finish_all(engine, first)
    finish_all(engine, second)
    assert second.num_cached == 49
    assert second.tokens.tolist() == first.tokens.tolist()
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)
    assert worst_gap(Reference(folder), second) < TOLERANCE


def test_only_new_tokens_are_computed(model: Model) -> None:
    engine = make_engine(model)
    prompt = random_prompt(40)
    turn = ask(prompt, "1", new=5)
    finish_all(engine, turn)
    # 40 of the prompt, and 4 of the 5 sampled: the last is never fed back.
    assert engine.runner.num_computed_tokens == 44
    answered = turn.tokens[: turn.num_tokens].tolist()
    finish_all(engine, ask(answered + random_prompt(10, seed=1), "2", new=1))
    assert engine.runner.num_computed_tokens == 44 + 1 + 10


def test_siblings_that_start_together_compute_their_prompt_once(model: Model) -> None:
    engine = make_engine(model)
    prompt = random_prompt(40)
    siblings = [ask(prompt, str(at), new=1, seed=at) for at in range(16)]
    finish_all(engine, *siblings)
    assert engine.runner.num_computed_tokens == 40 + 15
    assert [sibling.num_cached for sibling in siblings] == [0] + [39] * 15


def test_scored_prompt_is_computed_in_full_from_where_it_is_scored(model: Model) -> None:
    engine = make_engine(model)
    prompt = random_prompt(30)
    finish_all(engine, ask(prompt, "1", new=1))
    before = engine.runner.num_computed_tokens
    scored = ask(prompt, "2", new=0, logprob_start=10)
    finish_all(engine, scored)
    assert engine.runner.num_computed_tokens - before == 20
    assert len(scored.prompt_logprobs) == 19


def test_unpadding_inverts_padding() -> None:
    pad_BT, unpad_n = padding(np.array([2, 3, 1]), 3)
    packed = torch.arange(10, 16)
    padded = packed[pad_BT]
    assert padded[0, :2].tolist() == [10, 11]
    assert padded[1].tolist() == [12, 13, 14]
    assert torch.equal(padded.flatten()[unpad_n], packed)


def test_the_likeliest_tokens_are_those_of_transformers(model: Model, folder: Path) -> None:
    prompt = random_prompt(20)
    request = ask(prompt, new=5, seed=1, num_top=3, logprob_start=4)
    finish_all(make_engine(model, max_step_tokens=8), request)
    tokens = request.tokens[: request.num_tokens].tolist()
    values, ids = Reference(folder).logits(tokens).log_softmax(-1).topk(3)
    tops = request.prompt_tops + request.tops
    assert [[token for _, token in top] for top in tops] == ids[4:-1].tolist()
    recorded = torch.tensor([[logprob for logprob, _ in top] for top in tops])
    assert torch.allclose(recorded, values[4:-1], atol=1e-4)
