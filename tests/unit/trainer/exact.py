"""Samples of a tiny model with log-probs computed by transformers, and its forwards."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from rollmesh.core.config import TrainerConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.samples import Sample
from tests.unit.trainer.samples import new_sample

SETTINGS = TrainerConfig(learning_rate=1e-3, max_logprob_gap=0.05)
LONG, SHORT = [1, 2, 3, 4, 5, 6], [1, 2, 7, 8]


def recorded(
    folder: Path, token_ids: list[int], temperature: float = 1.0
) -> npt.NDArray[np.float64]:
    """Return the log-probs of `token_ids` by plain transformers; 0 for the first."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits[:-1], -1)[range(len(token_ids) - 1), token_ids[1:]]
    return np.array([0.0, *logprobs.tolist()])


def pair(folder: Path, temperature: float = 1.0, policy_version: int = 0) -> list[Sample]:
    """A group of two rollouts, the first better, with exact recordings."""
    masks = [[0, 0, 1, 0, 1, 1], [0, 0, 1, 1]]
    return [
        new_sample(
            token_ids,
            mask,
            index=index,
            reward=1.0 - index,
            logprobs=recorded(folder, token_ids, temperature),
            temperature=temperature,
            policy_version=policy_version,
        )
        for index, (token_ids, mask) in enumerate(zip((LONG, SHORT), masks, strict=True))
    ]


def two_groups(folder: Path, policy_version: int = 0) -> list[Sample]:
    """Two groups of two rollouts, so that each can be a minibatch."""
    return [
        msgspec.structs.replace(sample, rollout_id=RolloutId(GroupId("r", seq), index))
        for seq in range(2)
        for index, sample in enumerate(pair(folder, policy_version=policy_version))
    ]


@contextlib.contextmanager
def forwards() -> Iterator[list[int]]:
    """Yield a list that gets, for each forward of the model, its number of logit positions."""
    kept: list[int] = []

    def note(module: torch.nn.Module, _: object, output: CausalLMOutputWithPast) -> None:
        if isinstance(module, Qwen3ForCausalLM) and output.logits is not None:
            kept.append(output.logits.shape[1])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    yield kept
    hook.remove()
