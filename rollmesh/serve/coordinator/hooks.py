"""PipelineHooks: how a pipeline's own program requests GPUs and reports the progress of its
rollouts.

    with closing(PipelineHooks("tcp://scheduler:9000", "math")) as hooks:
        hooks.signal_rollout_demand(rollout_id=0, step_target=512)  # an engine is awake: dispatch
        hooks.begin_progress_batch(512)
        ... hooks.bump_completed() ...
        hooks.end_progress_batch()
        hooks.request_gpus("actor_train", GpuPriority.ACTOR_TRAINING).wait()
        ... train ...
        hooks.notify_release_gpus("actor_train").wait()

- Every method may be called from any thread. Only `wait` and `signal_rollout_demand` block, until
  they are asked to stop.
- An unreachable scheduler is a warning in the log, never an error; waiting continues until it is
  back. Only refusals are raised, as a UserError.
- Rollouts are counted, never groups.
"""

import collections
import threading
import time

from rollmesh.core.errors import UserError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.share import read_token
from rollmesh.core.share import token_file as find_token_file
from rollmesh.serve.coordinator.claims import (
    WITHDRAW_TIMEOUT_S,
    ClaimAction,
    ClaimEvent,
    Claims,
    ClaimSettled,
    GpuClaim,
    ProgramMessage,
    SchedulerReachable,
    SchedulerSilent,
    StillWaiting,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys, Role, check_dial, read_scheduler_keys
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    GpuPriority,
    HooksWired,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReportPreempt,
    ReportProgress,
    RequestGpus,
    SchedulerHello,
    TicketState,
    WithdrawRequest,
    signed,
)
from rollmesh.wire.sockets import Dialer, WakeSignal, wait

log = get_logger()

TURN_S = 0.25
"""Interval of time-based work."""
LOOK_S = 0.1
"""Interval of checks for the end of a wait."""
JOIN_S = 5.0


class GpuTicket:
    """A request or release, and its answer; see PipelineHooks."""

    def __init__(self, hooks: "PipelineHooks", claim: GpuClaim) -> None:
        self._hooks = hooks
        self._claim = claim
        self._is_settled = threading.Event()
        self._answer: ClaimSettled | None = None

    def wait(
        self, stop: threading.Event | None = None, timeout_s: float | None = None
    ) -> tuple[int, ...] | None:
        """Return the GPUs held once it is granted, or none once it is released.

        None if `stop` was set first, which withdraws a request; if `timeout_s` passed or the hooks
        were closed, which does not; or if a request ended without a grant because its cluster was
        released meanwhile. One-line UserError if the scheduler refuses it.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_settled.wait(LOOK_S if timeout_s is None else min(LOOK_S, timeout_s)):
            if not self._hooks.is_alive() and not self._is_settled.is_set():
                return None
            if stop is not None and stop.is_set():
                self.withdraw()
                return None
            if ends_s is not None and time.monotonic() >= ends_s:
                return None
        assert self._answer
        if self._answer.state is TicketState.REFUSED:
            claim = self._claim
            raise UserError(
                f"pipeline {claim.pipeline_id!r}, {claim.cluster}: {self._answer.reason}"
            )
        return None if self.is_void else self._answer.gpus

    @property
    def is_void(self) -> bool:
        """Whether it ended without a grant, so that the GPUs must be requested again. Not if it was
        refused, which `wait` raises."""
        is_release = isinstance(self._claim, NotifyReleaseGpus)
        answered = (TicketState.GRANTED, TicketState.REFUSED)
        ended = self._answer is not None and self._answer.state not in answered
        return ended and not is_release

    def withdraw(self) -> None:
        """Withdraw a request; a release stays one."""
        if not isinstance(self._claim, NotifyReleaseGpus):
            self._hooks.send(WithdrawRequest(self._claim.key))

    def settle(self, answer: ClaimSettled) -> None:
        """Set the answer; called by the hooks' thread."""
        self._answer = answer
        self._is_settled.set()


class PipelineHooks:
    def __init__(
        self,
        scheduler: str,
        pipeline_id: str,
        keys: Keys | None = None,
        token_file: str = "",
        withdraw_timeout_s: float = WITHDRAW_TIMEOUT_S,
    ) -> None:
        """Dial the scheduler and report that this pipeline's rollouts will send progress.

        `keys` and `token_file`, the file with the pipeline's token, default to the environment's
        (core/share.py). AddressError if `scheduler` is no address or one that needs keys.
        """
        keys = keys or read_scheduler_keys(Role.CLIENT, find_token_file(pipeline_id, token_file))
        check_dial(scheduler, keys)
        self.pipeline_id = pipeline_id
        self._token_file = token_file
        self._token = read_token(pipeline_id, token_file)
        self._refusal = ""
        self._incarnation = new_id("h")
        """Makes keys unique across restarts of a program."""
        self._claims = Claims(pipeline_id, withdraw_timeout_s)
        self._dialer = Dialer(scheduler, f"hooks-{pipeline_id}-{self._incarnation}", keys)
        self._bell = WakeSignal()
        self._lock = threading.Lock()
        self._num_asks = 0
        self._newest: dict[str, ReportProgress] = {}
        self._tickets: dict[str, GpuTicket] = {}
        self._outbox: collections.deque[ProgramMessage] = collections.deque()
        self._is_closing = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is pending and end the thread; grants stay."""
        if self._is_closing:
            return
        self._is_closing = True
        self._bell.ring()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._dialer.close()
            self._bell.close()

    # requests

    def signal_rollout_demand(
        self, rollout_id: int, step_target: int, stop: threading.Event | None = None
    ) -> bool:
        """Call before a rollout step of `step_target` rollouts: return once an engine is awake.
        False if `stop` was set first or the hooks were closed.

        The demand stays until it is released, or until all streams of progress have ended.
        """
        ticket = self.request_gpus(
            GENERATION_CLUSTER, GpuPriority.GENERATION, rollout_id, step_target
        )
        return ticket.wait(stop) is not None

    def request_gpus(
        self,
        cluster: str,
        priority: GpuPriority,
        global_step: int = -1,
        step_target_estimate: int = 0,
    ) -> GpuTicket:
        """Request all GPUs of a cluster, or engines of the elastic one for an estimated number of
        rollouts (0: unknown)."""
        key = self._key(cluster)
        return self._claim(
            RequestGpus(key, self.pipeline_id, cluster, priority, global_step, step_target_estimate)
        )

    def notify_release_gpus(self, cluster: str, global_step: int = -1) -> GpuTicket:
        """Release a cluster, held or not; the elastic one is settled when its engines sleep."""
        key = self._key(f"{cluster}-released")
        return self._claim(NotifyReleaseGpus(key, self.pipeline_id, cluster, global_step))

    def notify_release_then_request_gpus(
        self,
        release_cluster: str,
        cluster: str,
        priority: GpuPriority,
        *,
        release_global_step: int = -1,
        global_step: int = -1,
        step_target_estimate: int = 0,
    ) -> GpuTicket:
        """Both at once: no other request is planned for in between."""
        return self._claim(
            NotifyReleaseThenRequestGpus(
                self._key(f"{release_cluster}-then-{cluster}"),
                self.pipeline_id,
                release_cluster,
                cluster,
                priority,
                release_global_step,
                global_step,
                step_target_estimate,
            )
        )

    # progress

    def begin_progress_batch(
        self, step_target: int, completed: int = 0, stream: str = "train"
    ) -> None:
        """Begin a batch of `step_target` rollouts, some of which may be completed already."""
        with self._lock:
            before = self._newest.get(stream)
            # From the clock, so that batches of a restarted program are newer.
            batch = max(before.batch + 1 if before else 0, time.time_ns() // 1_000)
            self._report_progress(stream, batch, step_target, completed)

    def bump_completed(self, num_rollouts: int = 1, stream: str = "train") -> None:
        """Count completed rollouts of the batch; without a batch this does nothing."""
        with self._lock:
            newest = self._newest.get(stream)
            if newest:
                completed = newest.completed + num_rollouts
                self._report_progress(stream, newest.batch, newest.target, completed)

    def end_progress_batch(self, stream: str = "train") -> None:
        """End the batch; with its last stream a pipeline's demand is closed."""
        with self._lock:
            newest = self._newest.pop(stream, None)
        if newest:
            self.send(ClearProgress(self.pipeline_id, stream, newest.batch))

    def report_preempt(self, url: str, rank: int = -1) -> None:
        """Report that a rollout lost the engine at `url` and continues elsewhere; rank -1:
        unknown."""
        self.send(ReportPreempt(self.pipeline_id, rank, url))

    def _report_progress(self, stream: str, batch: int, target: int, completed: int) -> None:
        report = ReportProgress(self.pipeline_id, stream, batch, target, completed)
        self._newest[stream] = report
        self.send(report)

    # the thread

    def send(self, messages: ProgramMessage) -> None:
        """Queue a message for the thread."""
        self._outbox.append(messages)
        if not self._is_closing:
            self._bell.ring()

    def is_alive(self) -> bool:
        """Whether the thread runs; raises the fault that ended it, if any."""
        is_alive = self._thread.is_alive()
        if self._fault:
            raise self._fault.with_traceback(None)
        return is_alive

    def _key(self, what: str) -> str:
        with self._lock:
            self._num_asks += 1
            return f"{self.pipeline_id}/{what}/{self._incarnation}-{self._num_asks}"

    def _claim(self, claim: GpuClaim) -> GpuTicket:
        ticket = self._tickets[claim.key] = GpuTicket(self, claim)
        self.send(claim)
        return ticket

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
                wait([self._dialer], self._bell, 0.0 if self._outbox else TURN_S)
            self._turn()
        except Exception as error:  # door: the end of the thread must reach waiting callers
            log.exception("hooks.failed")
            self._fault = error

    def _turn(self) -> None:
        self._step(Ticked())
        for packet in self._dialer.receive():
            if isinstance(packet.message, SchedulerHello):
                self._log_refusal(packet.message.error)
            self._step(Received(ROUTER, packet.message, packet.body, packet.router))
        while self._outbox:
            self._step(self._outbox.popleft())

    def _log_refusal(self, error: str) -> None:
        if error and error != self._refusal:
            log.error("scheduler.refuses", why=error, pipeline=self.pipeline_id)
        self._refusal = error

    def _step(self, event: ClaimEvent) -> None:
        for action in self._claims.step(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: ClaimAction) -> None:
        where = {"pipeline": self.pipeline_id, "scheduler": self._dialer.address}
        match action:
            case Send(message=message):
                if isinstance(message, HooksWired) and not self._token:  # it may exist by now
                    self._token = read_token(self.pipeline_id, self._token_file)
                self._dialer.send(Packet(signed(message, self._token)))
            case ClaimSettled(key=key):
                self._tickets.pop(key).settle(action)
            case StillWaiting(claim, waited_s, reason):
                cluster = claim.cluster
                log.warning("gpus.wait", cluster=cluster, waited_s=round(waited_s), why=reason)
            case SchedulerSilent(silent_s):
                fix = "restart it; its journal has everything, and waiting continues until then"
                log.warning("scheduler.unreachable", silent_s=round(silent_s, 1), fix=fix, **where)
            case SchedulerReachable():
                log.info("scheduler.reachable", **where)
