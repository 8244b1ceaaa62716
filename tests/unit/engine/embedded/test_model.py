"""The forward pass agrees with transformers, for every supported family and rope."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.engine.embedded.engine import Engine, EngineLimits
from rollmesh.engine.embedded.model import Model, interleave, rotate
from rollmesh.engine.embedded.request import Request, Sampling
from tests.unit.engine.embedded.references import Reference
from tests.unit.engine.embedded.tiny_models import VOCAB_SIZE, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10_000.0,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1, "rope_theta": 1e6}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "head_dim": 8}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_scored_prompt_agrees_with_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, family, seed=3, **changes)
    engine = Engine(Model(folder, torch.float32), EngineLimits(num_slots=512, max_running=2), "0")
    prompt = np.random.default_rng(5).integers(0, VOCAB_SIZE, 90).astype(np.int32)
    request = Request("r", prompt, Sampling(max_new_tokens=0), logprob_start=0)
    engine.submit(request)
    engine.step()
    expected = Reference(folder).logprobs(prompt.tolist())
    np.testing.assert_allclose(request.prompt_logprobs, expected, atol=1e-4)


def test_rotation_of_interleaved_heads_is_the_rotation_of_halves() -> None:
    head_dim = 8
    heads = torch.randn(1, 1, head_dim, generator=torch.Generator().manual_seed(0))
    angles = torch.tensor([0.1, 0.7, 1.3, 2.9])
    first, second = heads[0, 0, :4], heads[0, 0, 4:]
    halves = torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
    )
    paired = interleave(heads[0, 0], head_dim).view(1, 1, head_dim)
    rotated = rotate(paired, torch.polar(torch.ones(4), angles).view(1, 1, 4))
    assert torch.allclose(rotated[0, 0], interleave(halves, head_dim), atol=1e-6)


def test_half_precision_stays_close_to_full_precision(folder: Path) -> None:
    prompt = np.arange(40, dtype=np.int32)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = Engine(Model(folder, dtype), EngineLimits(num_slots=64, max_running=1), "0")
        request = Request("r", prompt, Sampling(max_new_tokens=0), logprob_start=0)
        engine.submit(request)
        engine.step()
        scores.append(request.prompt_logprobs)
    differences = np.abs(np.subtract(scores[0], scores[1]))
    assert 0 < differences.max() < 1.0
    assert differences.mean() < 0.1
