"""Selection bias of a run: untrained rollouts by length, difficulty and environment.

    outcome     trained, masked (some or all of its tokens), requeued, or the code of its drop
    length      sampled tokens
    difficulty  mean reward of the other rollouts of the same task; the lower, the harder
    verdict     a rank-sum test over groups, since rollouts of one group are not independent

- The run may still be running: an incomplete last line is ignored, a malformed line is counted.
- Evaluations are left out. No numpy, so that it runs wherever the run folder is.
"""

import bisect
import collections
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

NUM_SLICES = 4
MIN_GROUPS = 8
"""With fewer groups on a side there is no test."""
EVALUATION = "evaluation"
EARLIER = "of an earlier run"

Row = TypeVar("Row")


class RankSum(msgspec.Struct, frozen=True):
    """The result of a rank-sum test."""

    share_larger: float
    """Share of pairs in which the first group's value is larger; a tie is half a pair."""
    p: float
    """Probability of so large a difference if there is none."""


def rank_sum(first: Sequence[float], second: Sequence[float]) -> RankSum | None:
    """Test whether the values of one group are larger (Mann and Whitney, 1947); None if a group is
    empty.

        U = pairs in which the value of the first is larger; ties count half
        z = (|U - mean| - 1/2) / sd       mean = n m / 2
        sd^2 = n m / 12 * ((N + 1) - sum(t^3 - t) / (N (N - 1)))    t: sizes of the groups of ties

    Two-sided normal approximation with corrections for ties and continuity; good from about eight
    values on each side. It assumes no distribution, which suits lengths with long tails. Swapping
    the groups replaces `share_larger` by its complement and changes nothing else.
    """
    num_first, num_second = len(first), len(second)
    if not num_first or not num_second:
        return None
    values = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    num, num_pairs = len(values), num_first * num_second
    rank, ranks_of_first, ties = 1, 0.0, 0
    for _, same in itertools.groupby(values, lambda each: each[0]):
        groups = [group for _, group in same]
        ranks_of_first += groups.count(0) * (rank + (len(groups) - 1) / 2)
        rank += len(groups)
        ties += len(groups) ** 3 - len(groups)
    larger = ranks_of_first - num_first * (num_first + 1) / 2
    variance = num_pairs / 12 * (num + 1 - ties / (num * (num - 1)))
    if variance <= 0.0:
        return RankSum(larger / num_pairs, 1.0)
    z = max(0.0, abs(larger - num_pairs / 2) - 0.5) / math.sqrt(variance)
    return RankSum(larger / num_pairs, math.erfc(z / math.sqrt(2.0)))


class TrajectoryLine(msgspec.Struct, frozen=True):
    """The fields of a line of trajectories.jsonl that are used here."""

    rollout_id: str
    task_id: str = ""
    env: str = ""
    is_eval: bool = False
    reward: float | None = None
    step: int | None = None
    length: int | None = None
    num_masked: int = 0


class DropLine(msgspec.Struct, frozen=True):
    """A line of drops.jsonl."""

    group_id: str
    reason: str
    num_rollouts: int = 1
    index: int | None = None
    task_id: str = ""
    env: str = ""
    length: int | None = None
    age: int | None = None

    @property
    def code(self) -> str:
        """The first part of the reason."""
        return self.reason.partition(":")[0]


class EndedRollout(msgspec.Struct):
    """One rollout that ended."""

    group_id: str
    outcome: str
    task_id: str
    env: str
    length: int | None
    reward: float | None
    age: int | None = None
    difficulty: float | None = None


class SelectionSlice(msgspec.Struct, frozen=True):
    """Rollouts with something in common."""

    name: str
    num: int
    shares: dict[str, float]
    """By outcome; they add up to 1."""


class OutcomeComparison(msgspec.Struct, frozen=True):
    """Compare the rollouts of one outcome with those that trained completely."""

    outcome: str
    by: str
    """`length` or `difficulty`."""
    num: int
    """Groups with such rollouts; the mean of each group counts, since siblings are alike."""
    num_trained: int
    median: float | None
    median_trained: float | None
    test: RankSum | None
    """None with too few groups on one side."""


class SelectionBias(msgspec.Struct, frozen=True):
    """The complete report."""

    num_ended: int
    outcomes: dict[str, int]
    unseen: dict[str, int]
    """Rollouts that never arrived, by the code of their drop."""
    mean_age: dict[str, float]
    """Mean age of dropped rollouts, by outcome."""
    by_length: list[SelectionSlice]
    by_difficulty: list[SelectionSlice]
    by_env: list[SelectionSlice]
    verdicts: list[OutcomeComparison]
    num_unread: int
    """Malformed lines."""


def selection_bias(folder: Path) -> SelectionBias:
    """Read the run folder of a finished or running run."""
    unread = collections.Counter[str]()
    drops = list(_rows(folder / "drops.jsonl", DropLine, unread))
    trajectories = _rows(folder / "trajectories.jsonl", TrajectoryLine, unread)
    ended = _ended(trajectories, drops)
    _add_difficulty(ended)
    outcomes = collections.Counter(each.outcome for each in ended)
    return SelectionBias(
        num_ended=len(ended),
        outcomes=dict(outcomes.most_common()),
        unseen=_unseen(drops),
        mean_age=_mean_ages(ended),
        by_length=_slices(ended, lambda each: each.length),
        by_difficulty=_slices(ended, lambda each: each.difficulty),
        by_env=_slices_by_env(ended),
        verdicts=list(_comparisons(ended)),
        num_unread=unread.total(),
    )


def _rows(path: Path, row_type: type[Row], unread: collections.Counter[str]) -> Iterator[Row]:
    if not path.is_file():
        return
    decode = msgspec.json.Decoder(row_type).decode
    with path.open("rb") as file:
        for line in file:
            try:
                row = decode(line)
            except msgspec.MsgspecError:
                unread[path.name] += line.endswith(b"\n")  # else the line is still being written
                continue
            yield row


def _ended(trajectories: Iterator[TrajectoryLine], drops: Sequence[DropLine]) -> list[EndedRollout]:
    dropped = {f"{row.group_id}/{row.index}": row for row in drops if row.index is not None}
    ended = []
    for row in trajectories:
        drop = dropped.pop(row.rollout_id, None)
        if row.is_eval or (row.step is None and drop is None):
            continue
        outcome = drop.code if drop else ("masked" if row.num_masked else "trained")
        age = drop.age if drop else None
        ended.append(
            EndedRollout(
                _group_of(row.rollout_id),
                outcome,
                row.task_id,
                row.env,
                row.length,
                row.reward,
                age,
            )
        )
    return ended + [
        EndedRollout(row.group_id, row.code, row.task_id, row.env, row.length, None, row.age)
        for row in dropped.values()
    ]


def _add_difficulty(ended: Sequence[EndedRollout]) -> None:
    """Set the difficulty of each rollout's task."""
    rewards = collections.defaultdict[tuple[str, str], list[float]](list)
    for each in ended:
        if each.reward is not None:
            rewards[each.env, each.task_id].append(each.reward)
    sums = {task: (sum(values), len(values)) for task, values in rewards.items()}
    for each in ended:
        total, num = sums.get((each.env, each.task_id), (0.0, 0))
        if each.reward is not None:
            total, num = total - each.reward, num - 1
        each.difficulty = total / num if num else None


def _unseen(drops: Sequence[DropLine]) -> dict[str, int]:
    unseen = collections.Counter[str]()
    for row in drops:
        if row.index is None and row.code not in (EVALUATION, EARLIER):
            unseen[row.code] += row.num_rollouts
    return dict(unseen.most_common())


def _mean_ages(ended: Sequence[EndedRollout]) -> dict[str, float]:
    ages = collections.defaultdict[str, list[int]](list)
    for each in ended:
        if each.age is not None:
            ages[each.outcome].append(each.age)
    return {outcome: statistics.fmean(values) for outcome, values in ages.items()}


def _slices(
    ended: Sequence[EndedRollout], value_of: Callable[[EndedRollout], float | None]
) -> list[SelectionSlice]:
    """Split into quarters, or fewer if many values are equal; rollouts without a value are in
    none."""
    known = [(value, each) for each in ended if (value := value_of(each)) is not None]
    if not known:
        return []
    values = sorted(value for value, _ in known)
    cuts = sorted({values[len(values) * at // NUM_SLICES] for at in range(1, NUM_SLICES)})
    inside: list[list[tuple[float, EndedRollout]]] = [[] for _ in range(len(cuts) + 1)]
    for value, each in known:
        inside[bisect.bisect_right(cuts, value)].append((value, each))
    return [_slice(_format_range([value for value, _ in part]), part) for part in inside if part]


def _slices_by_env(ended: Sequence[EndedRollout]) -> list[SelectionSlice]:
    names = sorted({each.env for each in ended})
    return [_slice(name, [(0.0, each) for each in ended if each.env == name]) for name in names]


def _slice(name: str, inside: Sequence[tuple[float, EndedRollout]]) -> SelectionSlice:
    outcomes = collections.Counter(each.outcome for _, each in inside)
    return SelectionSlice(
        name, len(inside), {outcome: num / len(inside) for outcome, num in outcomes.items()}
    )


def _format_range(values: Sequence[float]) -> str:
    low, high = (
        f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"


def _comparisons(ended: Sequence[EndedRollout]) -> Iterator[OutcomeComparison]:
    for outcome in sorted({each.outcome for each in ended} - {"trained"}):
        for by in ("length", "difficulty"):
            own, trained = _values(ended, outcome, by), _values(ended, "trained", by)
            is_enough = min(len(own), len(trained)) >= MIN_GROUPS
            yield OutcomeComparison(
                outcome=outcome,
                by=by,
                num=len(own),
                num_trained=len(trained),
                median=statistics.median(own) if own else None,
                median_trained=statistics.median(trained) if trained else None,
                test=rank_sum(own, trained) if is_enough else None,
            )


def _values(ended: Sequence[EndedRollout], outcome: str, by: str) -> list[float]:
    """Return the mean of each group."""
    groups = collections.defaultdict[str, list[float]](list)
    for each in ended:
        value = getattr(each, by)
        if each.outcome == outcome and value is not None:
            groups[each.group_id].append(value)
    return [statistics.fmean(values) for values in groups.values()]


def _group_of(rollout_id: str) -> str:
    return rollout_id.rpartition("/")[0]
