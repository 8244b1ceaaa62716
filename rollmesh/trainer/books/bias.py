"""What a run selects against: who did not train, by length, by difficulty and by environment.

    fate        trained, masked (some or all of its tokens), requeued, or the code of its drop
    length      tokens that were sampled
    difficulty  mean reward of the other rollouts of the same task; the lower, the harder
    verdict     a rank-sum test over groups, since the rollouts of one are no independent witnesses

Owns the reading of trajectories.jsonl and drops.jsonl for this. Invariants: a run that goes on may
be read, whose last lines may be torn; a line that does not fit is counted and passed over;
evaluations are left out. Without numpy, so that it runs wherever the run folder is. Driven by
`rollmesh trace bias`.
"""

import bisect
import collections
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmesh.trainer.books.ranksum import RankSum, rank_sum

NUM_PARTS = 4
FEWEST = 8
"""Of fewer groups on a side no test is made."""
EVALUATION = "evaluation"
EARLIER = "of an earlier run"

Row = TypeVar("Row")


class TrajectoryRow(msgspec.Struct, frozen=True):
    """A line of trajectories.jsonl, as far as this needs it."""

    rollout_id: str
    task_id: str = ""
    env: str = ""
    is_eval: bool = False
    reward: float | None = None
    step: int | None = None
    length: int | None = None
    num_masked: int = 0


class DropRow(msgspec.Struct, frozen=True):
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
        """What the reason begins with."""
        return self.reason.partition(":")[0]


class Ended(msgspec.Struct):
    """One rollout that came to its end."""

    group_id: str
    fate: str
    task_id: str
    env: str
    length: int | None
    reward: float | None
    age: int | None = None
    difficulty: float | None = None


class Part(msgspec.Struct, frozen=True):
    """Rollouts that have something in common."""

    name: str
    num: int
    shares: dict[str, float]
    """By fate; all add up to 1."""


class Verdict(msgspec.Struct, frozen=True):
    """How those of one fate differ from those that trained whole."""

    fate: str
    by: str
    """`length` or `difficulty`."""
    num: int
    """Groups with such rollouts; of each the mean counts, since siblings are alike."""
    num_trained: int
    median: float | None
    median_trained: float | None
    test: RankSum | None
    """None where there are too few on one side."""


class Bias(msgspec.Struct, frozen=True):
    """All of it."""

    num_ended: int
    fates: dict[str, int]
    unseen: dict[str, int]
    """Rollouts that never came, by the code of their drop; of them nothing is known."""
    mean_age: dict[str, float]
    """Of those that were dropped, by fate."""
    by_length: list[Part]
    by_difficulty: list[Part]
    by_env: list[Part]
    verdicts: list[Verdict]
    num_unread: int
    """Lines that do not fit."""


def bias_of(folder: Path) -> Bias:
    """Of a run folder, of a run that has ended or goes on."""
    unread = collections.Counter[str]()
    drops = list(_rows(folder / "drops.jsonl", DropRow, unread))
    trajectories = _rows(folder / "trajectories.jsonl", TrajectoryRow, unread)
    ended = _ended(trajectories, drops)
    _rate(ended)
    fates = collections.Counter(each.fate for each in ended)
    return Bias(
        num_ended=len(ended),
        fates=dict(fates.most_common()),
        unseen=_unseen(drops),
        mean_age=_mean_ages(ended),
        by_length=_parts(ended, lambda each: each.length),
        by_difficulty=_parts(ended, lambda each: each.difficulty),
        by_env=_parts_by_env(ended),
        verdicts=list(_verdicts(ended)),
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
                unread[path.name] += line.endswith(b"\n")  # else its writer is not done with it
                continue
            yield row


def _ended(trajectories: Iterator[TrajectoryRow], drops: Sequence[DropRow]) -> list[Ended]:
    lost = {f"{row.group_id}/{row.index}": row for row in drops if row.index is not None}
    ended = []
    for row in trajectories:
        drop = lost.pop(row.rollout_id, None)
        if row.is_eval or (row.step is None and drop is None):
            continue
        fate = drop.code if drop else ("masked" if row.num_masked else "trained")
        age = drop.age if drop else None
        ended.append(
            Ended(
                _group_of(row.rollout_id), fate, row.task_id, row.env, row.length, row.reward, age
            )
        )
    return ended + [
        Ended(row.group_id, row.code, row.task_id, row.env, row.length, None, row.age)
        for row in lost.values()
    ]


def _rate(ended: Sequence[Ended]) -> None:
    """Say of each how hard its task is."""
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


def _unseen(drops: Sequence[DropRow]) -> dict[str, int]:
    unseen = collections.Counter[str]()
    for row in drops:
        if row.index is None and row.code not in (EVALUATION, EARLIER):
            unseen[row.code] += row.num_rollouts
    return dict(unseen.most_common())


def _mean_ages(ended: Sequence[Ended]) -> dict[str, float]:
    ages = collections.defaultdict[str, list[int]](list)
    for each in ended:
        if each.age is not None:
            ages[each.fate].append(each.age)
    return {fate: statistics.fmean(values) for fate, values in ages.items()}


def _parts(ended: Sequence[Ended], of: Callable[[Ended], float | None]) -> list[Part]:
    """Quarters, fewer where many are equal; who has no value is in none."""
    known = [(value, each) for each in ended if (value := of(each)) is not None]
    if not known:
        return []
    values = sorted(value for value, _ in known)
    cuts = sorted({values[len(values) * at // NUM_PARTS] for at in range(1, NUM_PARTS)})
    inside: list[list[tuple[float, Ended]]] = [[] for _ in range(len(cuts) + 1)]
    for value, each in known:
        inside[bisect.bisect_right(cuts, value)].append((value, each))
    return [_part(_span([value for value, _ in part]), part) for part in inside if part]


def _parts_by_env(ended: Sequence[Ended]) -> list[Part]:
    names = sorted({each.env for each in ended})
    return [_part(name, [(0.0, each) for each in ended if each.env == name]) for name in names]


def _part(name: str, inside: Sequence[tuple[float, Ended]]) -> Part:
    fates = collections.Counter(each.fate for _, each in inside)
    return Part(name, len(inside), {fate: num / len(inside) for fate, num in fates.items()})


def _span(values: Sequence[float]) -> str:
    low, high = (
        f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"


def _verdicts(ended: Sequence[Ended]) -> Iterator[Verdict]:
    for fate in sorted({each.fate for each in ended} - {"trained"}):
        for by in ("length", "difficulty"):
            own, trained = _values(ended, fate, by), _values(ended, "trained", by)
            is_enough = min(len(own), len(trained)) >= FEWEST
            yield Verdict(
                fate=fate,
                by=by,
                num=len(own),
                num_trained=len(trained),
                median=statistics.median(own) if own else None,
                median_trained=statistics.median(trained) if trained else None,
                test=rank_sum(own, trained) if is_enough else None,
            )


def _values(ended: Sequence[Ended], fate: str, by: str) -> list[float]:
    """The mean of each group."""
    groups = collections.defaultdict[str, list[float]](list)
    for each in ended:
        value = getattr(each, by)
        if each.fate == fate and value is not None:
            groups[each.group_id].append(value)
    return [statistics.fmean(values) for values in groups.values()]


def _group_of(rollout_id: str) -> str:
    """Its group's id."""
    return rollout_id.rpartition("/")[0]
