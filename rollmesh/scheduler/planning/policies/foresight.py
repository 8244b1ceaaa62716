"""Whose demand is foreseen: engines that wake before the signal save its rollouts the wait.

    known      a wake before its signal is expected (habits.py) it counts as if it had asked for as
               much as the last time; as long after that it is not expected any more
    unknown    of who has not told its habits yet one engine is kept, for KEEP_S at the most
    waiting    who waits for a fixed cluster will not ask before it has that: nothing is foreseen

Owns nothing. Invariants: who has demand is not foreseen; whose engine is kept has no more than one
for that. What is foreseen is no demand: fair.py gives it up where somebody would have less than a
bundle for it. Driven by fair.py.
"""

import math
from typing import NamedTuple

from rollmesh.scheduler.planning.state import Pipeline, PipelinePhase, State
from rollmesh.wire.scheduling import GENERATION_CLUSTER

KEEP_S = 600.0
"""Who does not ask for so long may never ask again."""
ONE = 1
"""Rollouts that one engine is enough for."""


class Foresight(NamedTuple):
    """See the module."""

    rollouts: dict[str, int]
    """By pipeline, of those that count as if they had asked."""
    again_s: float
    """When there will be others."""


def foresee(state: State, lead_s: float) -> Foresight:
    """`lead_s`: so long before a signal an engine must be told to wake."""
    waiting = {request.pipeline_id for request in state.requests.values()}
    rollouts, again_s = dict[str, int](), math.inf
    for name, pipeline in state.pipelines.items():
        marked_s = pipeline.habits.marked_s
        if marked_s is None or name in waiting or not _may_ask(pipeline):
            continue
        expected_s = pipeline.habits.expected_s
        is_known = expected_s < math.inf
        from_s, until_s = expected_s - lead_s, expected_s + lead_s
        if not is_known:
            from_s, until_s = marked_s, marked_s + KEEP_S
        if from_s <= state.now_s < until_s:
            rollouts[name] = (is_known and pipeline.habits.estimate) or ONE
        edges_s = [each for each in (from_s, until_s) if each > state.now_s]
        again_s = min([again_s, *edges_s])
    return Foresight(rollouts, again_s)


def _may_ask(pipeline: Pipeline) -> bool:
    is_admitted = pipeline.phase is PipelinePhase.ADMITTED
    return is_admitted and pipeline.demand is None and GENERATION_CLUSTER not in pipeline.releasing
