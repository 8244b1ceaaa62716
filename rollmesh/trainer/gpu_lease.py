"""What computes on GPUs that are others' in between: there while they are held, and else not.

    built there -> THERE <-> AWAY (its weights and its optimiser are on the host)

Invariant: nothing is decided here, so that who trains and who asks for GPUs see each other through
it alone. Kept by the policy; driven by tenancy.py.

Whose GPUs a run computes on: its own, or those of a fleet that it shares.

    Unshared   nobody is asked, nothing is told
    Tenant     a scheduler is asked for engines before anything is asked of them, and for the
               trainer's GPUs before a step; it is told how many rollouts are to come

    a life   ASKED (for the trainer's GPUs, before all others) -> BUILT -> PUBLISHED -> given back
    a step   DEMANDED -> ROLLING OUT -> ASKED (for the trainer's GPUs) -> TRAINING -> TRAINED
             -> handed over: what the step had goes back as the next step's demand is opened, in
                one ask; or, where the next batch is there already, as the next step asks for it

Owns what this life has asked for. Invariants: nothing of a run is on the trainer's GPUs while it
does not hold them: what computes there is built when they are granted, and has left them before
they are given up; generation goes on while a step waits for GPUs or trains, on engines that no step
needs; what an earlier life held is given up before anything is asked for; a clean end leaves
neither hold nor demand. Rollouts are counted, never groups. Driven by the train loop and by
process.py, on one thread.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Literal, Protocol

from rollmesh.core.errors import UserError
from rollmesh.core.logs import get_logger
from rollmesh.core.share import Share
from rollmesh.core.types import GroupRecord
from rollmesh.serve.coordinator.hooks import PipelineHooks, Ticket
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority


class Offloadable(Protocol):
    """See the module."""

    def offload(self) -> None:
        """Nothing of it is there any more; it may still be saved."""

    def reload(self) -> None:
        """It computes there again."""


log = get_logger()

TRAIN_CLUSTER = "actor_train"
"""The name of the cluster that a train step needs all of."""
LOOK_S = 0.25
"""So long `may_train` waits before it says that it is not yet time."""
SLEEP_S = 30.0
"""So long a run that is done waits for its engines to sleep: those who run them end next."""
STOP_SHARE = 0.25
"""One that is told to stop waits for so much of the time that launch gives it."""

Stream = Literal["train", "eval"]


class GpuLease(Protocol):
    """What a train loop asks of it."""

    def acquire(self) -> bool:
        """Give up what an earlier life held, and wait for the trainer's GPUs; False where the run
        is to end before they are there."""

    def attach(self, lodger: Offloadable) -> None:
        """It was built on them."""

    def release_until_step(self) -> None:
        """The run has begun, and needs them no more until a step does."""

    def finish_step(self, step: int, num_to_come: int, *, is_next_there: bool) -> None:
        """The step before this one needs the trainer's GPUs no more; once for each that trained.

        `num_to_come` rollouts are, and the batch of this step may be there.
        """

    def may_ask(self, step: int, num_to_come: int, stream: Stream = "train") -> bool:
        """Whether rollouts may be asked for as `step` waits for its batch: an engine is awake for
        it, or the run has GPUs of its own. An evaluation waits for that, or for a stop."""

    def may_train(self, step: int) -> bool:
        """Whether the trainer's GPUs are there; waits a moment for them."""

    def report_moved(self, record: GroupRecord) -> None:
        """Say which of its rollouts have lost an engine in mid-turn, and gone on elsewhere."""

    def leave(self) -> None:
        """Give up everything; returns at once."""

    def close(self, patience_s: float) -> None:
        """Wait so long until that is done."""


class ExclusiveGpus:
    """See the module."""

    def acquire(self) -> bool:
        return True

    def attach(self, lodger: Offloadable) -> None:
        del lodger

    def release_until_step(self) -> None:
        """They are its own."""

    def may_ask(self, step: int, num_to_come: int, stream: Stream = "train") -> bool:
        del step, num_to_come, stream
        return True

    def may_train(self, step: int) -> bool:
        del step
        return True

    def finish_step(self, step: int, num_to_come: int, *, is_next_there: bool) -> None:
        del step, num_to_come, is_next_there

    def report_moved(self, record: GroupRecord) -> None:
        del record

    def leave(self) -> None:
        """Nobody waits for it."""

    def close(self, patience_s: float) -> None:
        del patience_s


class ScheduledGpus:
    """See the module."""

    def __init__(self, hooks: PipelineHooks, stop: threading.Event) -> None:
        """`stop` ends every wait."""
        self._hooks = hooks
        self._stop = stop
        self._begun: tuple[Stream, int] | None = None
        """The stream and step that progress is told of."""
        self._awake_for: tuple[Stream, int] | None = None
        """Those that an engine is awake for."""
        self._target = self._left = 0
        """Rollouts of the batch that progress is told of."""
        self._handed: Ticket | None = None
        """The next step's demand, opened as the last step ended."""
        self._train: Ticket | None = None
        self._is_there = False
        """What `_train` brought, which is still here."""
        self._lodger: Offloadable | None = None
        self._is_lodged = False
        """Something of the lodger may be on these GPUs."""
        self._releases: list[Ticket] = []

    def acquire(self) -> bool:
        self._train = self._give_up_for(TRAIN_CLUSTER, GpuPriority.INITIALIZATION, 0, 0)
        while not (self._stop.is_set() or self.may_train(0)):
            pass
        return self._is_there

    def attach(self, lodger: Offloadable) -> None:
        self._lodger, self._is_lodged = lodger, True

    def release_until_step(self) -> None:
        if self._is_there:
            self._offload()
            self._train = None
            self._hooks.notify_release_gpus(TRAIN_CLUSTER)

    def may_ask(self, step: int, num_to_come: int, stream: Stream = "train") -> bool:
        if not num_to_come:  # so nothing is asked for
            if self._begun == (stream, step):
                self._progress(stream, 0)
            return True
        if self._awake_for != (stream, step):
            if not self._has_engine(step, num_to_come, stream):
                return False
            self._awake_for = stream, step
        if self._begun != (stream, step):  # after the demand, which forgets what was told before
            self._begin(stream, step, num_to_come)
        self._progress(stream, num_to_come)
        return True

    def may_train(self, step: int) -> bool:
        if self._train is None or self._train.is_void:
            self._train = self._hooks.request_gpus(TRAIN_CLUSTER, GpuPriority.ACTOR_TRAINING, step)
        self._is_there = self._train.wait(self._stop, LOOK_S) is not None
        if self._is_there and self._lodger and not self._is_lodged:
            self._is_lodged = True
            self._lodger.reload()
        return self._is_there

    def finish_step(self, step: int, num_to_come: int, *, is_next_there: bool) -> None:
        if not self._is_there:
            return
        self._offload()
        if is_next_there:
            # Others that wait for these GPUs go first, and no engine is woken there for a moment.
            self._train = self._give_up_for(TRAIN_CLUSTER, GpuPriority.ACTOR_TRAINING, step, 0)
            self._awake_for = self._awake_for and ("train", step)
        else:
            self._train = None
            priority = GpuPriority.GENERATION
            self._handed = self._give_up_for(GENERATION_CLUSTER, priority, step, num_to_come)
        self._begin("train", step, num_to_come)

    def _give_up_for(
        self, cluster: str, priority: GpuPriority, step: int, num_to_come: int
    ) -> Ticket:
        """In one ask: what the step before has trained on, for what `step` needs."""
        return self._hooks.notify_release_then_request_gpus(
            TRAIN_CLUSTER,
            cluster,
            priority,
            release_global_step=step - 1,
            global_step=step,
            step_target_estimate=num_to_come,
        )

    def report_moved(self, record: GroupRecord) -> None:
        for url in left_in_mid_turn(record):
            self._hooks.report_preempt(url)

    def leave(self) -> None:
        self._offload()
        for ticket in (self._handed, self._train):
            if ticket:
                ticket.withdraw()
        if self._begun:
            self._hooks.end_progress_batch(self._begun[0])
        clusters = (TRAIN_CLUSTER, GENERATION_CLUSTER)
        self._releases = [self._hooks.notify_release_gpus(cluster) for cluster in clusters]

    def close(self, patience_s: float) -> None:
        ends_s = time.monotonic() + patience_s
        with contextlib.suppress(UserError):  # of one that is not known any more nothing is held
            for ticket in self._releases:
                if ticket.wait(timeout_s=max(0.0, ends_s - time.monotonic())) is None:
                    fix = "none, once its engines have ended; else: rollmesh scheduler kill"
                    log.warning("gpus.not_released", pipeline=self._hooks.pipeline_id, fix=fix)
                    break
        self._hooks.close()

    def _offload(self) -> None:
        """Before a word is said: who is given these GPUs may be there at once."""
        if self._is_lodged and self._lodger:
            self._lodger.offload()
        self._is_there = self._is_lodged = False

    def _has_engine(self, step: int, num_to_come: int, stream: Stream) -> bool:
        """Whether one is awake for the step's rollouts, whose demand is opened where it is not."""
        if stream == "eval":
            return self._hooks.signal_rollout_demand(step, num_to_come, self._stop)
        if self._handed is None or self._handed.is_void:
            self._handed = self._hooks.request_gpus(
                GENERATION_CLUSTER, GpuPriority.GENERATION, step, num_to_come
            )
        if self._handed.wait(self._stop, 0.0) is None:
            return False
        self._handed = None
        return True

    def _begin(self, stream: Stream, step: int, num_to_come: int) -> None:
        """A batch of progress; the stream before ends only then, so that demand does not."""
        before, self._begun = self._begun, (stream, step)
        self._target = self._left = num_to_come
        self._hooks.begin_progress_batch(num_to_come, stream=stream)
        if before and before[0] != stream:
            self._hooks.end_progress_batch(before[0])

    def _progress(self, stream: Stream, num_to_come: int) -> None:
        num_more = num_to_come - self._left
        self._left = num_to_come
        if num_more > 0:  # weights were published, say, and there is room for more
            self._target += num_more
            self._hooks.begin_progress_batch(self._target, self._target - num_to_come, stream)
        elif num_more < 0:
            self._hooks.bump_completed(-num_more, stream)


def left_in_mid_turn(record: GroupRecord) -> Iterator[str]:
    """Engines that a turn was begun on, and that another ended with the same weights: an update,
    which moves turns as well, brings others."""
    for rollout in record.rollouts:
        for node in rollout.nodes:
            for before, after in itertools.pairwise(node.policy_versions):
                is_same = before.policy_version == after.policy_version
                if is_same and before.engine != after.engine and before.engine >= 0:
                    yield rollout.engines[before.engine]


def gpu_lease_of(share: Share | None, stop: threading.Event) -> GpuLease:
    """The run's part in a fleet, if it shares one; AddressError for a bad scheduler address."""
    if share is None:
        return ExclusiveGpus()
    hooks = PipelineHooks(share.scheduler, share.pipeline_id, token_file=share.token_file)
    return ScheduledGpus(hooks, stop)
