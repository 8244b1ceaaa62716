"""PipelineHooks: how a pipeline's own program asks for GPUs, and tells how far its rollouts are.

    with closing(PipelineHooks("tcp://scheduler:9000", "math")) as hooks:
        hooks.signal_rollout_demand(rollout_id=0, step_target=512)  # an engine is awake: dispatch
        hooks.begin_progress_batch(512)
        ... hooks.bump_completed() ...
        hooks.end_progress_batch()
        hooks.request_gpus("actor_train", GpuPriority.ACTOR_TRAINING).wait()
        ... train ...
        hooks.notify_release_gpus("actor_train").wait()

Owns one socket and the thread that has it. Invariants: every method may be called from any thread
and only `wait` and `signal_rollout_demand` wait, until they are told to stop; a scheduler that
cannot be reached is a warning in the log, never an error here, and waiting goes on until it is
back; only what it refuses is raised, as the user's mistake that it is. Rollouts are counted, never
groups of them. Driven by the trainer's tenancy, or by anybody's rollout function.
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
    Action,
    Claim,
    Claims,
    Event,
    Said,
    SchedulerHeard,
    SchedulerSilent,
    Settled,
    Waits,
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
"""Between two looks at the time."""
LOOK_S = 0.1
"""Between two looks at what may end a wait."""
JOIN_S = 5.0


class Ticket:
    """One ask and its answer; see PipelineHooks."""

    def __init__(self, hooks: "PipelineHooks", claim: Claim) -> None:
        self._hooks = hooks
        self._claim = claim
        self._is_settled = threading.Event()
        self._answer: Settled | None = None

    def wait(
        self, stop: threading.Event | None = None, timeout_s: float | None = None
    ) -> tuple[int, ...] | None:
        """The GPUs that are held once it is granted, none once it is released.

        None where `stop` was set first, which withdraws a request, or where `timeout_s` went by or
        the hooks were closed, which does not; and where a request has ended without a grant, since
        its cluster was given up meanwhile. UserError, in one line, where the scheduler refuses it.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_settled.wait(LOOK_S if timeout_s is None else min(LOOK_S, timeout_s)):
            if not self._hooks.is_heard() and not self._is_settled.is_set():
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
        """It has ended, and was never granted: who wants the GPUs still asks anew. Not where it was
        refused, which `wait` raises: it would be again."""
        is_release = isinstance(self._claim, NotifyReleaseGpus)
        answered = (TicketState.GRANTED, TicketState.REFUSED)
        ended = self._answer is not None and self._answer.state not in answered
        return ended and not is_release

    def withdraw(self) -> None:
        """Nobody waits for it any more; a release stays one."""
        if not isinstance(self._claim, NotifyReleaseGpus):
            self._hooks.say(WithdrawRequest(self._claim.key))

    def settle(self, answer: Settled) -> None:
        """The hooks' thread has heard of it."""
        self._answer = answer
        self._is_settled.set()


class PipelineHooks:
    """See the module."""

    def __init__(
        self, scheduler: str, pipeline_id: str, keys: Keys | None = None, token_file: str = ""
    ) -> None:
        """Dial the scheduler and report that this pipeline's rollouts will send progress.

        `keys` and `token_file`, the file with the pipeline's token, are the environment's by
        default (core/share.py). AddressError where `scheduler` is no address, or one that needs
        keys.
        """
        keys = keys or read_scheduler_keys(Role.CLIENT, find_token_file(pipeline_id, token_file))
        check_dial(scheduler, keys)
        self.pipeline_id = pipeline_id
        self._token_file = token_file
        self._token = read_token(pipeline_id, token_file)
        self._refusal = ""
        self._life = new_id("h")
        """Keys of no two lives of a program are equal."""
        self._claims = Claims(pipeline_id)
        self._dialer = Dialer(scheduler, f"hooks-{pipeline_id}-{self._life}", keys)
        self._bell = WakeSignal()
        self._lock = threading.Lock()
        self._num_asks = 0
        self._newest: dict[str, ReportProgress] = {}
        self._tickets: dict[str, Ticket] = {}
        self._said: collections.deque[Said] = collections.deque()
        self._is_closing = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say what was still to be said and end the thread; what was granted stays granted."""
        if self._is_closing:
            return
        self._is_closing = True
        self._bell.ring()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._dialer.close()
            self._bell.close()

    # asks

    def signal_rollout_demand(
        self, rollout_id: int, step_target: int, stop: threading.Event | None = None
    ) -> bool:
        """Call it before a rollout starts, of which `step_target` rollouts are to come: it returns
        at once where an engine is awake, else when one is. False where `stop` was set first, or the
        hooks were closed.

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
    ) -> Ticket:
        """Ask for all GPUs of a cluster, or for engines of the elastic one, for which so many
        rollouts are to come (0: unknown)."""
        key = self._key(cluster)
        return self._claim(
            RequestGpus(key, self.pipeline_id, cluster, priority, global_step, step_target_estimate)
        )

    def notify_release_gpus(self, cluster: str, global_step: int = -1) -> Ticket:
        """Give up a cluster, held or not; of the elastic one, it is settled when engines sleep."""
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
    ) -> Ticket:
        """Both at once: nobody else is planned for in between."""
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
        """A batch of `step_target` rollouts begins, of which some may be there already."""
        with self._lock:
            before = self._newest.get(stream)
            # Of the clock, so that a program that was started again is not taken for its past.
            batch = max(before.batch + 1 if before else 0, time.time_ns() // 1_000)
            self._report_progress(stream, batch, step_target, completed)

    def bump_completed(self, num_rollouts: int = 1, stream: str = "train") -> None:
        """So many rollouts more of the batch have ended; without a batch it says nothing."""
        with self._lock:
            newest = self._newest.get(stream)
            if newest:
                completed = newest.completed + num_rollouts
                self._report_progress(stream, newest.batch, newest.target, completed)

    def end_progress_batch(self, stream: str = "train") -> None:
        """Nothing more comes of it: with its last stream a pipeline's demand is closed."""
        with self._lock:
            newest = self._newest.pop(stream, None)
        if newest:
            self.say(ClearProgress(self.pipeline_id, stream, newest.batch))

    def report_preempt(self, url: str, rank: int = -1) -> None:
        """A rollout has lost the engine at `url`, and goes on elsewhere; -1: of unknown rank."""
        self.say(ReportPreempt(self.pipeline_id, rank, url))

    def _report_progress(self, stream: str, batch: int, target: int, completed: int) -> None:
        report = ReportProgress(self.pipeline_id, stream, batch, target, completed)
        self._newest[stream] = report
        self.say(report)

    # the thread

    def say(self, words: Said) -> None:
        """Have the thread say this."""
        self._said.append(words)
        if not self._is_closing:
            self._bell.ring()

    def is_heard(self) -> bool:
        """Whether the thread lives, without which nobody would be answered any more; raises what
        ended it, if that was a fault."""
        is_alive = self._thread.is_alive()
        if self._fault:
            raise self._fault.with_traceback(None)
        return is_alive

    def _key(self, what: str) -> str:
        with self._lock:
            self._num_asks += 1
            return f"{self.pipeline_id}/{what}/{self._life}-{self._num_asks}"

    def _claim(self, claim: Claim) -> Ticket:
        ticket = self._tickets[claim.key] = Ticket(self, claim)
        self.say(claim)
        return ticket

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
                wait([self._dialer], self._bell, 0.0 if self._said else TURN_S)
            self._turn()
        except Exception as error:  # door: the thread's end must reach those who wait
            log.exception("hooks.failed")
            self._fault = error

    def _turn(self) -> None:
        self._step(Ticked())
        for packet in self._dialer.receive():
            if isinstance(packet.message, SchedulerHello):
                self._log_refusal(packet.message.error)
            self._step(Received(ROUTER, packet.message, packet.body, packet.router))
        while self._said:
            self._step(self._said.popleft())

    def _log_refusal(self, error: str) -> None:
        if error and error != self._refusal:
            log.error("scheduler.refuses", why=error, pipeline=self.pipeline_id)
        self._refusal = error

    def _step(self, event: Event) -> None:
        for action in self._claims.step(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        told = {"pipeline": self.pipeline_id, "scheduler": self._dialer.address}
        match action:
            case Send(message=message):
                if isinstance(message, HooksWired) and not self._token:  # it may be there by now
                    self._token = read_token(self.pipeline_id, self._token_file)
                self._dialer.send(Packet(signed(message, self._token)))
            case Settled(key=key):
                self._tickets.pop(key).settle(action)
            case Waits(claim, waited_s, reason):
                cluster = claim.cluster
                log.warning("gpus.wait", cluster=cluster, waited_s=round(waited_s), why=reason)
            case SchedulerSilent(silent_s):
                fix = "start it again; its journal holds all, and waiting goes on until then"
                log.warning("scheduler.unreachable", silent_s=round(silent_s, 1), fix=fix, **told)
            case SchedulerHeard():
                log.info("scheduler.reachable", **told)
