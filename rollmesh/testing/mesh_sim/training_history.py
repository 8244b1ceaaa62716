"""The history of the simulated trainer: everything that it wrote, checked as it is written.

- A group is asked for once, ends once, and is in exactly one step. No step and no policy version is
  named twice.
- No token that trains is older than the bound; a redone step trains the same tokens.
- Weights are made of the steps of the history, each with its own groups, in order, however often
  they were trained.
"""

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import (
    GroupAsked,
    GroupBooked,
    GroupKept,
    GroupParted,
    Groups,
    Published,
    StepTaken,
    decode_entry,
)
from rollmesh.testing.mesh_sim.requesting_client import GroupEnds
from rollmesh.testing.mesh_sim.rollouts import SimGroupTurns
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan
from rollmesh.trainer.pacing.lifecycle import MAX_REQUEUES, GroupLeft, GroupOutcome, TrainGroups
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from rollmesh.wire.frames import decode_ask

Rollouts = tuple[frozenset[int], ...]
"""Policy versions of the tokens of each rollout that may train."""


class TrainingHistory:
    """Everything that the simulated trainer ever wrote, checked as it is written."""

    def __init__(self, settings: StalenessSettings, num_samples: int) -> None:
        self.settings = settings
        self.asked: dict[GroupId, str] = {}
        """Task id of each group."""
        self._evals: set[GroupId] = set()
        """Groups that do not train."""
        self._again: set[GroupId] = set()
        """Groups whose tasks were asked for again."""
        self._parted: dict[GroupId, int] = {}
        """How often the tasks of dropped results were to be asked for again."""
        self.endings = GroupEnds()
        self.steps: dict[int, tuple[GroupId, ...]] = {}
        self.step_of_version = {0: 0}
        self.num_incarnations = 0
        self.num_redone = 0
        self._num_samples = num_samples
        self._num_drawn = 0
        self._taken: dict[GroupId, int] = {}
        """Step of each group."""
        self._rollouts: dict[GroupId, Rollouts] = {}
        """Versions of all groups with a result."""
        self._trained: dict[int, list[Rollouts]] = {}
        """Tokens that are left once those that are too old are masked, by step."""
        self._freed: set[GroupId] = set()
        """Groups that the journal may have removed."""
        self._unwritten: set[GroupId] = set()
        """Groups whose rows were lost with a damaged checkpoint."""
        self._lost_steps: set[int] = set()
        """Steps that are not in the weights for the same reason."""

    @property
    def num_trained(self) -> int:
        """Number of groups."""
        return len(self._taken)

    def wrote(self, frames: list[bytes]) -> None:
        """Check a record that is on the disk."""
        match decode_entry(frames):
            case GroupAsked() as entry if entry.group_id not in self.asked:
                self._asked(entry, decode_ask(frames[1]).task.id)
            case GroupKept(group_id):
                turns = msgspec.msgpack.decode(frames[1], type=SimGroupTurns)
                assert turns.are_exact(), f"{group_id}: tokens are not exact"
                assert group_id in self.asked, f"{group_id} was never asked for"
                self._rollouts[group_id] = turns.rollouts()
                self.endings.add(group_id, "")
            case GroupBooked(group_id, reason):
                self.endings.add(group_id, reason)
            case GroupParted(group_id, times=times):
                assert group_id not in self._taken, f"{group_id} is dropped after its step"
                self._parted[group_id] = times
            case StepTaken(step, group_ids):
                self._took(step, group_ids)
            case Published(policy_version, step):
                assert policy_version > max(self.step_of_version), f"{policy_version} again"
                self.step_of_version[policy_version] = step
            case _:
                pass

    def recovered(self, history: History, plan: RecoveryPlan) -> None:
        """Check the plan of a restarted trainer."""
        self.num_incarnations += 1
        self._lost_steps |= set(range(plan.num_steps, history.saved.num_steps)) & self.steps.keys()
        redone = {each.step: each.group_ids for each in plan.redo}
        later = {step: ids for step, ids in self.steps.items() if step >= plan.num_steps}
        assert redone == {step: later[step] for step in later.keys() - self._lost_steps}
        self.num_redone += len(redone)
        gone = ids_of(plan.saved.gone)
        self._freed |= ids_of(history.saved.gone)
        self._unwritten |= ids_of(history.saved.gone) - gone
        is_open = self.asked.keys() - self.endings.reasons.keys()
        assert {each.group_id for each in plan.open_asks} == is_open
        left = self._rollouts.keys() - self._taken.keys() - gone - self._freed
        assert {each.group_id for each in plan.ready} == left - self._parted.keys()
        assert {each.group_id for each in plan.parted} == left & self._parted.keys()

    def admitted(self, gone: Groups, staleness: StalenessManager) -> None:
        """Check that all that the journal recovered counts, and nothing else: requests may
        begin.
        """
        settings = self.settings
        to_train = self.asked.keys() - self._evals
        waiting = len(to_train - ids_of(gone) - self._freed) * self._num_samples
        assert (staleness.running, staleness.ready) == (waiting, 0)
        room = (settings.max_staleness + 1) * settings.batch - waiting
        formula = max(0, min(settings.max_concurrent - waiting, room))
        assert staleness.capacity == formula, f"capacity {staleness.capacity}, not {formula}"

    def trains(self, train: TrainGroups) -> bool:
        """A step begins, for the first time or again; return whether anything of it is masked."""
        taken, bound = train.taken, self.settings.max_staleness
        left: list[Rollouts] = []
        for group_id in taken.group_ids:
            rollouts = self._rollouts[group_id]
            for policy_version in frozenset[int]().union(*rollouts):
                age = taken.step - self.step_of_version[policy_version]
                is_masked = policy_version in train.stale
                assert is_masked == (age > bound), f"{group_id} would train a token of age {age}"
            left.append(tuple(each - train.stale for each in rollouts))
            assert any(left[-1]), f"nothing of {group_id} is left to train"
        before = self._trained.setdefault(taken.step, left)
        assert left == before, f"step {taken.step} trains other tokens than before"
        return left != [self._rollouts[group_id] for group_id in taken.group_ids]

    def trained(self, weights: list[StepTaken]) -> None:
        """A step has ended, and these groups are in the weights."""
        made_of = {each.step: each.group_ids for each in weights}
        assert len(made_of) == len(weights), "a step is twice in the weights"
        assert list(made_of) == sorted(made_of), "the weights have steps in another order"
        newest = weights[-1].step
        history = {step: ids for step, ids in self.steps.items() if step <= newest}
        assert made_of == {step: history[step] for step in history.keys() - self._lost_steps}

    def check_left(self, left: list[GroupLeft], waiting: set[GroupId]) -> None:
        """Check, at rest, that each requested group has left once in a way that fits its result, or
        waits.
        """
        outcomes = {each.group_id: each.outcome for each in left}
        assert len(outcomes) == len(left), "a group left twice"
        assert not waiting & outcomes.keys(), "what has left waits for a step"
        missing = self.asked.keys() - outcomes.keys() - waiting - self._unwritten
        assert not missing, f"unknown end of {missing}"
        assert outcomes.keys() <= self.asked.keys(), "a group left without a request on the disk"
        for group_id, outcome in outcomes.items():
            allowed = self._allowed_outcomes(group_id)
            assert outcome in allowed, f"{group_id} left as {outcome}"
        to_ask = {group_id for group_id, times in self._parted.items() if times}
        assert self._again <= to_ask, "what was asked for again had not been dropped for that"
        missing = to_ask - self._again - self._unwritten
        assert not missing, f"the tasks of {missing} were to be asked for again"

    def _allowed_outcomes(self, group_id: GroupId) -> set[GroupOutcome]:
        has_result = not self.endings.reasons[group_id]
        if group_id in self._evals:
            return {GroupOutcome.MEASURED if has_result else GroupOutcome.UNMEASURED}
        if not has_result:
            return {GroupOutcome.FAILED}
        if not self._rollouts[group_id]:
            return {GroupOutcome.UNTRAINABLE}
        if group_id in self._taken:
            return {GroupOutcome.TRAINED}
        # With `wait`, a group is too old only if it was sampled by older weights than it was asked
        # for: an earlier incarnation of the trainer asked for it.
        if self.settings.policy == "wait" and self.num_incarnations == 1:
            return set()
        return (
            {GroupOutcome.STALE, GroupOutcome.REQUEUED}
            if self.settings.policy == "requeue"
            else {GroupOutcome.STALE}
        )

    def _asked(self, asked: GroupAsked, task_id: str) -> None:
        group_id = asked.group_id
        self._evals |= {group_id} if asked.is_eval else set()
        if again := asked.again:
            assert again.group_id not in self._again, f"{again.group_id} was asked for again twice"
            assert task_id == self.asked[again.group_id], f"{group_id} is of another task"
            assert again.times <= MAX_REQUEUES, f"{group_id}: once too often"
            self._again.add(again.group_id)
        else:
            assert asked.num_drawn > self._num_drawn, f"{group_id} has an old task"
        self._num_drawn = max(self._num_drawn, asked.num_drawn)
        self.asked[group_id] = task_id

    def _took(self, step: int, group_ids: tuple[GroupId, ...]) -> None:
        assert step not in self.steps, f"step {step} was taken twice"
        for group_id in group_ids:
            assert group_id not in self._taken, f"{group_id} is in two steps"
            assert group_id not in self._evals, f"{group_id} is of an evaluation"
            assert group_id in self._rollouts, f"{group_id} was trained without a result"
            self._taken[group_id] = step
        self.steps[step] = group_ids


def ids_of(groups: Groups) -> set[GroupId]:
    """Return the ids in the intervals."""
    return {
        GroupId(run_id, seq)
        for run_id, intervals in groups.items()
        for start, stop in intervals
        for seq in range(start, stop)
    }
