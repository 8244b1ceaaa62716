"""The GPUs of a run: its own, or those of a fleet that several runs share.

    process  ASKED (for the trainer's GPUs, before all others) -> BUILT -> PUBLISHED -> given back
    a step   DEMANDED -> ROLLING OUT -> ASKED (for the trainer's GPUs) -> TRAINING -> TRAINED
             -> finished: its GPUs are given back in the same request that opens the next step's
                demand, or, if the next batch is already there, that asks for GPUs for it

- Nothing of a run is on the trainer's GPUs while it does not hold them: the policy is built when
  they are granted, and offloaded before they are given back.
- Generation continues while a step waits for GPUs or trains, on engines that no step needs.
- GPUs of an earlier process of the run are given back before anything is requested; a clean end
  leaves neither holds nor demand. Rollouts are counted, never groups.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Literal, Protocol

from rollmesh.core.errors import UserError
from rollmesh.core.logs import get_logger
from rollmesh.core.share import TRAIN_CLUSTER, Share
from rollmesh.core.types import GroupRecord
from rollmesh.serve.coordinator.claims import WITHDRAW_TIMEOUT_S
from rollmesh.serve.coordinator.hooks import GpuTicket, PipelineHooks
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority

log = get_logger()


class Offloadable(Protocol):
    """State on GPUs that can be moved to the host and back."""

    def offload(self) -> None:
        """Move everything to the host; it can still be saved."""

    def reload(self) -> None:
        """Move everything back to the GPUs."""


GRANT_WAIT_S = 0.25
"""Longest wait of `may_train` for a grant."""
STOP_SHARE = 0.25
"""Share of the stop timeout that a stopped run may wait."""

Stream = Literal["train", "eval"]


class GpuLease(Protocol):
    """Right of a train loop to use its GPUs."""

    def acquire(self) -> bool:
        """Give back GPUs of an earlier process, and wait for the trainer's GPUs; return False if
        the run is stopped first."""

    def attach(self, offloadable: Offloadable) -> None:
        """Register the state that was built on the GPUs."""

    def release_until_step(self) -> None:
        """Give back the trainer's GPUs until the first step needs them."""

    def finish_step(self, step: int, num_to_come: int, *, is_next_there: bool) -> None:
        """Give back the trainer's GPUs after the step before `step`; once for each trained step.

        `num_to_come` rollouts are expected; `is_next_there`: the batch of `step` is complete.
        """

    def may_request(self, step: int, num_to_come: int, stream: Stream = "train") -> bool:
        """Whether rollouts may be requested for `step`: an engine is awake for it, or the run has
        its own GPUs. For an evaluation, wait for that or for a stop."""

    def may_train(self, step: int) -> bool:
        """Whether the trainer's GPUs are granted; wait GRANT_WAIT_S for them."""

    def report_moved(self, record: GroupRecord) -> None:
        """Report engines that rollouts of the group lost during a turn."""

    def release_all(self) -> None:
        """Give back everything, without waiting."""

    def close(self, patience_s: float) -> None:
        """Wait up to `patience_s` until everything is given back."""


class ExclusiveGpus:
    """GPUs of the run's own: nothing is requested or reported."""

    def acquire(self) -> bool:
        return True

    def attach(self, offloadable: Offloadable) -> None:
        del offloadable

    def release_until_step(self) -> None:
        """Do nothing."""

    def may_request(self, step: int, num_to_come: int, stream: Stream = "train") -> bool:
        del step, num_to_come, stream
        return True

    def may_train(self, step: int) -> bool:
        del step
        return True

    def finish_step(self, step: int, num_to_come: int, *, is_next_there: bool) -> None:
        del step, num_to_come, is_next_there

    def report_moved(self, record: GroupRecord) -> None:
        del record

    def release_all(self) -> None:
        """Do nothing."""

    def close(self, patience_s: float) -> None:
        del patience_s


class ScheduledGpus:
    """GPUs of a shared fleet: a scheduler grants engines for rollouts and GPUs for a step, and
    receives the number of rollouts that are expected."""

    def __init__(self, hooks: PipelineHooks, stop: threading.Event) -> None:
        """`stop` ends every wait."""
        self._hooks = hooks
        self._stop = stop
        self._begun: tuple[Stream, int] | None = None
        """Stream and step of the reported progress."""
        self._awake_for: tuple[Stream, int] | None = None
        """Stream and step that an engine is awake for."""
        self._target = self._left = 0
        """Rollouts of the reported batch: in total, and still to come."""
        self._next_demand: GpuTicket | None = None
        """Demand of the next step, opened as the last step ended."""
        self._train: GpuTicket | None = None
        self._is_there = False
        """Whether the GPUs of `_train` are held."""
        self._lodger: Offloadable | None = None
        self._is_attached = False
        """Whether the attached state may be on these GPUs."""
        self._releases: list[GpuTicket] = []

    def acquire(self) -> bool:
        self._train = self._give_up_for(TRAIN_CLUSTER, GpuPriority.INITIALIZATION, 0, 0)
        while not (self._stop.is_set() or self.may_train(0)):
            pass
        return self._is_there

    def attach(self, offloadable: Offloadable) -> None:
        self._lodger, self._is_attached = offloadable, True

    def release_until_step(self) -> None:
        if self._is_there:
            self._offload()
            self._train = None
            self._hooks.notify_release_gpus(TRAIN_CLUSTER)

    def may_request(self, step: int, num_to_come: int, stream: Stream = "train") -> bool:
        if not num_to_come:  # nothing is requested
            if self._begun == (stream, step):
                self._progress(stream, 0)
            return True
        if self._awake_for != (stream, step):
            if not self._has_engine(step, num_to_come, stream):
                return False
            self._awake_for = stream, step
        if self._begun != (stream, step):  # after the demand, which resets progress
            self._begin(stream, step, num_to_come)
        self._progress(stream, num_to_come)
        return True

    def may_train(self, step: int) -> bool:
        if self._train is None or self._train.is_void:
            self._train = self._hooks.request_gpus(TRAIN_CLUSTER, GpuPriority.ACTOR_TRAINING, step)
        self._is_there = self._train.wait(self._stop, GRANT_WAIT_S) is not None
        if self._is_there and self._lodger and not self._is_attached:
            self._is_attached = True
            self._lodger.reload()
        return self._is_there

    def finish_step(self, step: int, num_to_come: int, *, is_next_there: bool) -> None:
        if not self._is_there:
            return
        self._offload()
        if is_next_there:
            # Other runs that wait for these GPUs come first, and no engine wakes in between.
            self._train = self._give_up_for(TRAIN_CLUSTER, GpuPriority.ACTOR_TRAINING, step, 0)
            self._awake_for = self._awake_for and ("train", step)
        else:
            self._train = None
            priority = GpuPriority.GENERATION
            self._next_demand = self._give_up_for(GENERATION_CLUSTER, priority, step, num_to_come)
        self._begin("train", step, num_to_come)

    def _give_up_for(
        self, cluster: str, priority: GpuPriority, step: int, num_to_come: int
    ) -> GpuTicket:
        """Give back the GPUs of the step before and request `cluster`, in one message."""
        return self._hooks.notify_release_then_request_gpus(
            TRAIN_CLUSTER,
            cluster,
            priority,
            release_global_step=step - 1,
            global_step=step,
            step_target_estimate=num_to_come,
        )

    def report_moved(self, record: GroupRecord) -> None:
        for url in engines_left_in_mid_turn(record):
            self._hooks.report_preempt(url)

    def release_all(self) -> None:
        self._offload()
        for ticket in (self._next_demand, self._train):
            if ticket:
                ticket.withdraw()
        if self._begun:
            self._hooks.end_progress_batch(self._begun[0])
        clusters = (TRAIN_CLUSTER, GENERATION_CLUSTER)
        self._releases = [self._hooks.notify_release_gpus(cluster) for cluster in clusters]

    def close(self, patience_s: float) -> None:
        ends_s = time.monotonic() + patience_s
        with contextlib.suppress(UserError):  # unknown to the scheduler: nothing is held
            for ticket in self._releases:
                if ticket.wait(timeout_s=max(0.0, ends_s - time.monotonic())) is None:
                    fix = "none, once its engines have ended; else: rollmesh scheduler kill"
                    log.warning("gpus.not_released", pipeline=self._hooks.pipeline_id, fix=fix)
                    break
        self._hooks.close()

    def _offload(self) -> None:
        """Offload before any message: another run may use the GPUs at once."""
        if self._is_attached and self._lodger:
            self._lodger.offload()
        self._is_there = self._is_attached = False

    def _has_engine(self, step: int, num_to_come: int, stream: Stream) -> bool:
        """Whether an engine is awake for the step's rollouts; open their demand if not."""
        if stream == "eval":
            return self._hooks.signal_rollout_demand(step, num_to_come, self._stop)
        if self._next_demand is None or self._next_demand.is_void:
            self._next_demand = self._hooks.request_gpus(
                GENERATION_CLUSTER, GpuPriority.GENERATION, step, num_to_come
            )
        if self._next_demand.wait(self._stop, 0.0) is None:
            return False
        self._next_demand = None
        return True

    def _begin(self, stream: Stream, step: int, num_to_come: int) -> None:
        """Begin a batch of progress; only then end the stream before, so that demand continues."""
        before, self._begun = self._begun, (stream, step)
        self._target = self._left = num_to_come
        self._hooks.begin_progress_batch(num_to_come, stream=stream)
        if before and before[0] != stream:
            self._hooks.end_progress_batch(before[0])

    def _progress(self, stream: Stream, num_to_come: int) -> None:
        num_more = num_to_come - self._left
        self._left = num_to_come
        if num_more > 0:  # for example, a publication made room for more
            self._target += num_more
            self._hooks.begin_progress_batch(self._target, self._target - num_to_come, stream)
        elif num_more < 0:
            self._hooks.bump_completed(-num_more, stream)


def engines_left_in_mid_turn(record: GroupRecord) -> Iterator[str]:
    """Engines that began a turn which another engine ended with the same weights. (An update moves
    turns too, but with other weights.)"""
    for rollout in record.rollouts:
        for node in rollout.nodes:
            for before, after in itertools.pairwise(node.policy_versions):
                is_same = before.policy_version == after.policy_version
                if is_same and before.engine != after.engine and before.engine >= 0:
                    yield rollout.engines[before.engine]


def gpu_lease_of(
    share: Share | None, stop: threading.Event, withdraw_timeout_s: float = WITHDRAW_TIMEOUT_S
) -> GpuLease:
    """Return the GPUs of the run; raise AddressError for a bad scheduler address."""
    if share is None:
        return ExclusiveGpus()
    hooks = PipelineHooks(
        share.scheduler,
        share.pipeline_id,
        token_file=share.token_file,
        withdraw_timeout_s=withdraw_timeout_s,
    )
    return ScheduledGpus(hooks, stop)
