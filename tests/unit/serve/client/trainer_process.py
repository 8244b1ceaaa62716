"""A trainer's use of its client journal without a mesh, for tests of the journal's contents.

The trainer tracks by itself what the journal should contain.
"""

from pathlib import Path

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.types import GroupRecord, SamplingPolicy, Task
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.client.journal import ClientJournal, open_journal
from rollmesh.serve.client.journal_entries import (
    Again,
    GroupParted,
    GroupTried,
    Published,
    RunBegan,
    StepTaken,
)
from rollmesh.trainer.checkpoints.recovery_plan import LoopState, PendingTask, plan_recovery
from rollmesh.wire.frames import Packet, encode_ask, encode_record
from rollmesh.wire.messages import GroupAsk, GroupFinished

CONFIG = JournalConfig(segment_bytes=600, max_bytes=10_000)
BATCH = 2
EVAL_PERIOD = 5
"""One request in so many belongs to an evaluation; the journal does not track its outcome."""


class Trainer:
    """A trainer's use of its journal: which groups exist, and where."""

    def __init__(self, folder: Path, config: JournalConfig = CONFIG) -> None:
        self.folder = folder
        self._config = config
        self.saved: LoopState | None = None
        """The newest durable checkpoint."""
        self.open: list[GroupId] = []
        self.ready: list[GroupId] = []
        self.evals: set[GroupId] = set()
        self.again: dict[GroupId, Again] = {}
        """Repeated requests, whatever their outcome."""
        self.waiting: list[Again] = []
        """Requests to repeat."""
        self.trained: dict[int, tuple[GroupId, ...]] = {}
        self.gone: dict[str, IntervalSet] = {}
        self.step_of_version = {0: 0}
        self.num_starts = self.num_asked = self.num_steps = self.policy_version = 0
        self.client_journal: ClientJournal
        self.restart()

    def restart(self) -> None:
        """Restart; the process before may have been killed."""
        self.client_journal = open_journal(self.folder, self._config)
        self.plan = plan_recovery(self.saved, self.client_journal.history())
        self.num_starts += 1
        self.client_journal.begin(
            RunBegan(f"r{self.num_starts}", "c1", "tcp://sink"), self.plan.saved
        )

    def do(self, act: str, pick: int) -> None:
        """Perform an operation, if it is possible."""
        match act:
            case "ask":
                self._ask()
            case "keep" | "fail" | "drop" if self.open:
                self._end(act, self.open.pop(pick % len(self.open)))
            case "try" if self.open:
                self.client_journal.note(GroupTried(self.open[pick % len(self.open)], pick + 2, 0))
            case "step" if len(self.ready) >= BATCH:
                self._step()
            case "part" if self.ready:
                self._part(self.ready.pop(pick % len(self.ready)))
            case "publish":
                self.policy_version += 1
                self.step_of_version[self.policy_version] = self.num_steps
                self.client_journal.note(Published(self.policy_version, self.num_steps))
            case "copy" | "tell" | "save":
                self._save(act)
            case "restart":
                self.client_journal.close()
                self.restart()

    def _save(self, act: str) -> None:
        if act != "tell":
            self.make_checkpoint()
        if act != "copy":
            self.report_checkpoint()

    def make_checkpoint(self) -> None:
        self.saved = LoopState(
            num_steps=self.num_steps,
            policy_version=self.policy_version,
            step_of_version=dict(self.step_of_version),
            num_tasks=self.num_asked,
            waiting=tuple(PendingTask(Task(id="t"), each) for each in self._not_ended_again()),
            ended={run: each.intervals() for run, each in self.gone.items()},
        )

    def report_checkpoint(self) -> None:
        if self.saved:
            self.client_journal.cover(self.saved.to_journal())

    def _ask(self) -> None:
        group_id = GroupId(f"r{self.num_starts}", self.num_asked)
        self.num_asked += 1
        again = self.waiting.pop(0) if self.waiting else None
        if again:
            self.again[group_id] = again
        if is_eval := self.num_asked % EVAL_PERIOD == 0:
            self.evals.add(group_id)
        ask = GroupAsk(task=Task(id=str(group_id)), sampling=SamplingPolicy(), seed=0)
        self.client_journal.ask(
            Asked(
                group_id=group_id,
                env="guess",
                num_samples=4,
                asked_step=self.num_steps,
                num_drawn=self.num_asked,
                is_eval=is_eval,
                again=again,
                body=encode_ask(ask),
            )
        )
        self.open.append(group_id)

    def _end(self, act: str, group_id: GroupId) -> None:
        if act == "drop":
            self.client_journal.ended[group_id.run_id].add(group_id.seq)
            self.client_journal.drop(group_id, "deadline: over")
        else:
            message = GroupFinished(group_id, 1, "w1", act == "keep")
            body = encode_record(GroupRecord(task=Task(id="t"), reason="infra_error: no GPU"))
            self.client_journal.keep(message, Packet(message, "", body, (b"ids!" * 20, b"lps!")))
            self.client_journal.ended[group_id.run_id].add(group_id.seq)
        if act == "keep":
            self.ready.append(group_id)
        else:
            self._leave(group_id)

    def _part(self, group_id: GroupId) -> None:
        self.client_journal.part(GroupParted(group_id, "requeued: age 9", self.num_steps, 1))
        self.waiting.append(Again(group_id, 1))
        self._leave(group_id)

    def _not_ended_again(self) -> list[Again]:
        """Requests that a checkpoint must hold, because the journal may not have them."""
        return self.waiting + [self.again[each] for each in self.open if each in self.again]

    def _step(self) -> None:
        taken = tuple(self.ready[:BATCH])
        del self.ready[:BATCH]
        self.client_journal.note(StepTaken(self.num_steps, taken))
        self.trained[self.num_steps] = taken
        self.num_steps += 1
        for group_id in taken:
            self._leave(group_id)

    def _leave(self, group_id: GroupId) -> None:
        self.gone.setdefault(group_id.run_id, IntervalSet()).add(group_id.seq)
