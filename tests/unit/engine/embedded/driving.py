"""Make seeded requests and run an engine until it is idle, without threads."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmesh.engine.embedded.engine import Engine, EngineLimits
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import Progress, Request, Sampling
from tests.unit.engine.embedded.tiny_models import VOCAB_SIZE


def make_engine(model: Model, **limits: int) -> Engine:
    """Make an engine of policy version "0" with little memory."""
    return Engine(model, EngineLimits(**{"num_slots": 1024, "max_running": 32} | limits), "0")


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Seeded token ids."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
    return drawn


def ask(prompt: Sequence[int], rid: str = "r", new: int = 8, seed: int = 0, **rest: Any) -> Request:
    """Make a request; fields of Sampling in `rest` go to Sampling, all others to Request."""
    sampling = {k: rest.pop(k) for k in list(rest) if k in Sampling.__struct_fields__}
    return Request(
        rid,
        np.array(prompt, dtype=np.int32),
        Sampling(max_new_tokens=new, seed=seed, **sampling),
        **rest,
    )


def finish_all(engine: Engine, *requests: Request) -> list[Progress]:
    """Submit the requests, step until the engine is idle, and return all progress."""
    for request in requests:
        engine.submit(request)
    progress = engine.step()
    while engine.has_work:
        progress += engine.step()
    return progress


def output(request: Request) -> list[int]:
    """Return the sampled tokens."""
    sampled: list[int] = request.tokens[request.num_prompt_tokens : request.num_tokens].tolist()
    return sampled
