"""From settings to a Runtime: the model folder's tokens, engines of a fleet view, one sampler.

Invariant: workers and gateways are put together here and nowhere else, so that the same call costs
and gives the same in both. Driven by their processes.
"""

from collections.abc import Callable
from pathlib import Path

from rollmesh.core.config import Config
from rollmesh.engine.view import FleetView
from rollmesh.runtime.families import choose_family
from rollmesh.runtime.images import images
from rollmesh.runtime.legs import Sampler, SamplerParts
from rollmesh.runtime.patience import GenerationSettings
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.stops import StopStrings
from rollmesh.runtime.tokenizer import load_tokenizer
from rollmesh.wire.fleet import EngineFaulted

GC_THRESHOLDS = (10_000, 100, 50)
"""Collections of young objects now and then, while the cache still has them: ten thousand cost
under 1 ms, fifty thousand 14. Cycles are rare here, so of older ones hardly ever."""


def new_runtime(
    config: Config, view: FleetView, report: Callable[[EngineFaulted], None]
) -> tuple[Runtime, Sampler]:
    """A runtime, and the sampler to close when it ends; faults of engines go to `report`.

    ModelError or ConfigError in one line where the model's folder or renderer is none.
    """
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, config.model.renderer, tokenizer), tokenizer)
    parts = SamplerParts(
        view=view,
        vocab_size=tokenizer.vocab_size,
        report=report,
        new_matcher=lambda stops: StopStrings(stops, tokenizer.stream()),
        max_inflight=config.engine.max_inflight,
    )
    generation = GenerationSettings(
        retry_window_s=config.interception.retry_window_s,
        engine_wait_s=config.interception.engine_wait_s,
        answer_timeout_s=config.engine.answer_timeout_s,
    )
    sampler = Sampler(parts, generation)
    images.allow_hosts(config.interception.image_hosts)
    lines = config.interception.rotating_lines
    runtime = Runtime(
        sampler,
        prompts,
        config.model.max_context_tokens,
        rotating_lines=lines,
        max_session_bytes=config.interception.max_session_bytes,
        max_turns_at_once=config.interception.max_turns_at_once,
    )
    return runtime, sampler
