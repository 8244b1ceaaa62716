"""The score of a group: its siblings, what child tasks borrow of them, and what came of it.

    siblings --lend--> score_siblings | score_group --one score each--> on the records
                            +--raises, or its time is over--> why

Invariants: whatever the environment's code does, every loan is back when it is over, and the keys
that it was given answer 410 from then on; a score is on a record only if all are. Driven by
groups.py.
"""

from collections.abc import Iterator, Sequence, Sized
from contextlib import ExitStack
from typing import Any

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Endpoint, Env, Sibling
from rollmesh.serve.server.rollouts import (
    NO_FAULT,
    Fault,
    Played,
    Stage,
    check_score,
    fault_of,
    give_score,
    score_limit,
)

log = get_logger()


async def score_together(
    stage: Stage, group_id: GroupId, task: Task, played: Sequence[Played]
) -> Fault:
    """Let the environment score the siblings that have a score; NO_FAULT if that worked."""
    env = type(stage.env)
    has_children = env.score_siblings is not Env.score_siblings
    scored = [each for each in played if each.score is not None]
    method = "score_siblings" if has_children else "score_group"
    name = f"{env.__name__}.{method}"
    try:
        if has_children:
            found = await _with_children(stage, group_id, task, scored)
        elif env.score_group is not Env.score_group:
            scores = [each.score for each in scored if each.score is not None]
            limit = score_limit(stage.settings)
            found = await stage.calls.call(limit, stage.env.score_group, task, scores)
        else:
            return NO_FAULT
        for each, score in zip(scored, _checked(found, len(scored), name), strict=True):
            give_score(each.record, score)
    except Exception as error:  # door: env code may raise anything
        log.exception(f"{method}.failed", task_id=task.id)
        fault = fault_of(error, getattr(stage.env, method))
        return fault._replace(text=f"infra_error: {method}: {fault.text}")
    return NO_FAULT


def _checked(found: Any, num: int, name: str) -> list[Score]:
    """The scores that the method `name` returned for `num` siblings; EnvError for anything else."""
    num_found = len(found) if isinstance(found, Sized) else "no"
    if num_found != num:
        raise EnvError(f"{name} returned {num_found} scores for {num} siblings")
    return [check_score(each, name) for each in found]


async def _with_children(
    stage: Stage, group_id: GroupId, task: Task, scored: Sequence[Played]
) -> list[Score]:
    with ExitStack() as loans:
        siblings = list(_siblings(stage, group_id, scored, loans))
        # Its time is that of the children, too: they find their keys out of date.
        limit = score_limit(stage.settings, loans.close)
        return await stage.calls.call(limit, stage.env.score_siblings, task, siblings)


def _siblings(
    stage: Stage, group_id: GroupId, scored: Sequence[Played], loans: ExitStack
) -> Iterator[Sibling]:
    for each in scored:
        assert each.score is not None
        assert each.transcript is not None
        rollout_id = RolloutId(group_id, each.record.index)

        def borrowed(*, appends: bool, rollout_id: RolloutId = rollout_id) -> Endpoint:
            loan = stage.runtime.lend(rollout_id, "score_siblings", appends=appends)
            loans.enter_context(loan)
            return Endpoint(stage.base_url, loan.api_key, stage.model_name)

        yield Sibling(
            index=each.record.index,
            score=each.score,
            transcript=each.transcript,
            line=borrowed(appends=True),
            model=borrowed(appends=False),
        )
