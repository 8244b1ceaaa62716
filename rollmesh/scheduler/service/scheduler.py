"""Scheduler machine: handles a message, plans, carries the plan out, and reports.

    tickets.py       requests with a key, the queue     demands.py        demand for generation
    intents.py       operations in progress             coordinators.py   reports on engines
    registry.py      pipelines, runs and nodes          state.py          the state and its rows

- What a step has changed is in its WriteRows, before any message of the step.
- If a plan fails, it is reported, fixed clusters continue without the policy, and the next event
  plans again. A step that changes nothing relevant makes no plan.
- After a restart nothing is planned until every coordinator has reported or `settle_s` has passed.
- Pure: no clock, no sockets. It needs a tick at least every `tick_s`.
"""

import hmac
import math
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from rollmesh.core.secret_files import hash_token
from rollmesh.scheduler.planning.plan import GpuPlan
from rollmesh.scheduler.planning.planner import FixedOnly, SchedulingPolicy, plan
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.coordinators import CoordinatorTracker
from rollmesh.scheduler.service.demands import DemandTracker
from rollmesh.scheduler.service.explain import ExplainContext, OpInProgress, explain_fleet
from rollmesh.scheduler.service.intents import Intents, limit_s, note_turns
from rollmesh.scheduler.service.journal import restore_state
from rollmesh.scheduler.service.registry import PipelineRegistry
from rollmesh.scheduler.service.state import (
    Action,
    Event,
    Intent,
    JournalTables,
    SchedulerSettings,
    SchedulerState,
    describe_recent,
)
from rollmesh.scheduler.service.tickets import TicketQueue, holders
from rollmesh.wire.machine import Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    AdmitPipeline,
    CheckKill,
    ClaimPipeline,
    ClearProgress,
    CoordinatorHello,
    DrainNode,
    HooksWired,
    JoinNode,
    KillPipeline,
    NodeBeat,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReadScheduler,
    RegisterPipeline,
    ReportPreempt,
    ReportProgress,
    RequestGpus,
    SchedulerAnswered,
    SchedulerHello,
    TakeGpus,
    TicketMoved,
    TicketState,
    UndrainNode,
    UnregisterPipeline,
    WithdrawRequest,
    WorkersResized,
)

REMEDY = (
    "`rollmesh scheduler register` keeps it in tokens/ of the journal's folder; name that file by "
    "--pipeline-token or ROLLMESH_PIPELINE_TOKEN_FILE"
)


class TokenCheck:
    """Checks the token of each message that changes a pipeline.

    - Only hashes of tokens are known; they are journalled with the pipeline.
    - The operator's token, which the admission process has, is valid for every pipeline and
      required to register one. Without an operator's token (in a simulator), pipelines need no
      token.
    - A refused message changes nothing and is answered in one line if it has an answer.
    """

    def __init__(self, state: SchedulerState, operator_hash: str = "") -> None:
        self._state = state
        self._operator_hash = operator_hash

    def is_refused(self, route: bytes, message: AnyMessage) -> bool:
        """Whether the message must not be carried out; then its sender is answered."""
        token: str | None = getattr(message, "token", None)
        why = "" if token is None else self._fault(message, hash_token(token))
        if why:
            self._answer(route, message, why)
        return bool(why)

    def _fault(self, message: AnyMessage, shown: str) -> str:
        if self._operator_hash and hmac.compare_digest(shown, self._operator_hash):
            return ""
        if isinstance(message, RegisterPipeline):
            why = "only the admission process of this scheduler registers pipelines"
            return why if self._operator_hash else ""
        name = self._name(message)
        record = self._state.pipeline_records.get(name)
        if record is None:  # its handler answers
            return ""
        if not record.token_hash:
            why = f"{name} was registered without a token; register it again"
            return why if self._operator_hash else ""
        if hmac.compare_digest(shown, record.token_hash):
            return ""
        return f"the token of {name} is {'wrong' if shown else 'missing'}: {REMEDY}"

    def _name(self, message: AnyMessage) -> str:
        """The pipeline that it would change; '' if unknown."""
        if isinstance(message, TakeGpus | WithdrawRequest):
            ticket = self._state.tickets.get(message.key)
            return ticket.pipeline_id if ticket else ""
        return getattr(message, "pipeline_id", "")

    def _answer(self, route: bytes, message: AnyMessage, why: str) -> None:
        match message:
            case HooksWired() | CoordinatorHello():
                hello = SchedulerHello(self._state.incarnation, error=why)
                self._state.send(route, hello)
            case (
                RequestGpus(key)
                | NotifyReleaseGpus(key)
                | NotifyReleaseThenRequestGpus(key)
                | TakeGpus(key)
                | WithdrawRequest(key)
            ):
                self._state.send(route, TicketMoved(key, TicketState.REFUSED, reason=why))
            case _ if isinstance(message, AdmissionMessage):
                self._state.send(route, SchedulerAnswered(message.key, False, why))


_QUIET = frozenset({"progress", "credits", "numbers"})
"""Tables whose changes require no action."""
MAX_TICKS = 4
"""After a longer gap between steps the scheduler itself was held up, and silent peers may have sent
messages meanwhile. This is excused once per grace; a loop that is always slow still hears its peers
every turn."""
ROUNDS = 3
"""Plans in one step, for GPUs that a plan frees at once; the rest follow in the next step."""


class FleetScheduler:
    """Scheduler machine; `state` is its read-only view. Tests may replace the parts with faulty
    ones."""

    DEMANDS: ClassVar[type[DemandTracker]] = DemandTracker
    INTENTS: ClassVar[type[Intents]] = Intents
    TICKETS: ClassVar[type[TicketQueue]] = TicketQueue
    COORDINATORS: ClassVar[type[CoordinatorTracker]] = CoordinatorTracker
    REGISTRY: ClassVar[type[PipelineRegistry]] = PipelineRegistry

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: SchedulingPolicy,
        tables: JournalTables | None = None,
        incarnation: str = "",
        operator_hash: str = "",
    ) -> None:
        """Continue from `tables` if given; `incarnation` must be unique.

        `operator_hash` is the hash of the operator's token.
        """
        self.policy = policy
        self.state = restore_state(SchedulerState(settings, incarnation), tables or JournalTables())
        self.demands = self.DEMANDS(self.state)
        self.intents = self.INTENTS(self.state)
        self.tickets = self.TICKETS(self.state, self.demands, self.intents)
        self.coordinators = self.COORDINATORS(self.state, self.intents)
        self.registry = self.REGISTRY(self.state, self.tickets, self.demands, self.intents)
        self._tokens = TokenCheck(self.state, operator_hash)
        self._has_begun = False
        self._began_s, self._forgiven_s = 0.0, -math.inf
        self._is_settled = tables is None
        self._has_moved = True
        """Whether anything changed since the last attempt to plan or settle."""
        self._handlers: dict[type, Callable[[bytes, Any], object]] = {
            HooksWired: self.registry.on_wired,
            RequestGpus: self.tickets.on_ask,
            NotifyReleaseGpus: self.tickets.on_ask,
            NotifyReleaseThenRequestGpus: self.tickets.on_ask,
            TakeGpus: self.tickets.on_take,
            WithdrawRequest: self.tickets.on_withdraw,
            ReportProgress: self._on_report,
            ClearProgress: self._on_clear,
            ReportPreempt: self._on_preempt,
            CoordinatorHello: self.coordinators.on_hello,
            WorkersResized: self._on_resized,
            RegisterPipeline: self.registry.on_ask,
            AdmitPipeline: self.registry.on_ask,
            CheckKill: self.registry.on_ask,
            KillPipeline: self.registry.on_ask,
            UnregisterPipeline: self.registry.on_ask,
            ClaimPipeline: self.registry.on_ask,
            JoinNode: self.registry.on_ask,
            DrainNode: self.registry.on_ask,
            UndrainNode: self.registry.on_ask,
            NodeBeat: self._on_beat,
            ReadScheduler: self._on_read,
        }

    def step(self, event: Event, now_s: float, is_last: bool = True) -> list[Action]:
        """Handle one event; unknown messages change nothing, and time never runs back.

        Of events that arrived together, only the last (`is_last`) makes a plan.
        """
        self._start(now_s)
        if isinstance(event, Ticked):
            self._on_tick()
        elif (handler := self._handlers.get(type(event.message))) and not self._tokens.is_refused(
            event.route, event.message
        ):
            handler(event.route, event.message)
        self._has_moved |= self.state.has_changed(_QUIET)
        if is_last:
            self._settle()
        self.tickets.notify()
        return self.state.take_actions()

    @property
    def due_s(self) -> float:
        """When a plan is due without an event."""
        return self.state.again_s if self._is_settled else math.inf

    def explain_context(self) -> ExplainContext:
        """Facts for explain.py besides the planner's state."""
        state = self.state
        return ExplainContext(
            scheduler=state.incarnation,
            policy=self.policy.name,
            reserve_after_s=self.policy.reserve_after_s,
            again_s=state.again_s,
            in_progress=tuple(
                OpInProgress(
                    pipeline_id=intent.pipeline_id,
                    cluster=intent.cluster,
                    rank=intent.rank,
                    stage=intent.phase.value,
                    since_s=intent.planned_s,
                    until_s=intent.until_s,
                )
                for intent in state.intents.values()
            ),
            live_coordinators=self.coordinators.live_coordinators(),
            runs={name: each.run for name, each in state.pipeline_records.items() if each.run},
            faults={name: each.why for name, each in state.pipeline_records.items() if each.why},
            retry_s={
                name: state.links[name].retry_s
                for name, t in state.pipeline_records.items()
                if t.why
            },
            lately=describe_recent(state.ended.values(), state.now_s),
            problems=tuple(state.problems),
        )

    # the end of a step

    def _start(self, now_s: float) -> None:
        """Advance time; excuse silence at the start or while the scheduler was held up."""
        state, before_s = self.state, self.state.now_s
        state.now_s = state.fleet.now_s = max(now_s, before_s)
        if not self._has_begun:
            self._has_begun, self._began_s = True, state.now_s
            for intent in state.intents.values():
                if intent.resize_id:  # it may not have arrived: restart its deadline
                    for_s = limit_s(state.settings, intent.kind) + state.settings.slack_s
                    self._defer(intent, state.now_s + for_s)
            self._forgive(math.inf)
        elif self._was_held_up(before_s):
            self._forgiven_s = state.now_s
            for intent in state.intents.values():
                if intent.resize_id:
                    self._defer(intent, intent.until_s + state.now_s - before_s)
            self._forgive(state.now_s - before_s)

    def _was_held_up(self, before_s: float) -> bool:
        settings = self.state.settings
        grace_s = max(settings.coordinator_grace_s, settings.node_grace_s, settings.patience_s)
        gap_s = self.state.now_s - before_s
        return gap_s > MAX_TICKS * settings.tick_s and before_s >= self._forgiven_s + grace_s

    def _defer(self, intent: Intent, until_s: float) -> None:
        intent.until_s = until_s
        self.state.mark("intents", intent.intent_id)

    def _forgive(self, gap_s: float) -> None:
        """Excuse a gap in which no message could be received."""
        state, now_s = self.state, self.state.now_s
        for asker in state.reply_targets.values():
            asker.last_seen_s = min(now_s, asker.last_seen_s + gap_s)
        for link in state.links.values():
            link.last_seen_s = min(now_s, link.last_seen_s + gap_s)
            link.progressed_s = min(now_s, link.progressed_s + gap_s)
        for name in state.node_records:
            state.nodes_seen_s[name] = min(now_s, state.nodes_seen_s.get(name, now_s) + gap_s)

    def _settle(self) -> None:
        """Plan if needed, carry out what can be done, and grant what is ready."""
        state = self.state
        if not (self._is_due() or self._has_moved):
            return
        self._has_moved = False
        for _ in range(ROUNDS):
            if self._is_due():
                self._plan()
            self.intents.drive()
            self.tickets.settle_grants()
            self.tickets.settle_releases()
            self.registry.settle_leavers()
            if not state.wants_plan:
                break

    def _is_due(self) -> bool:
        state = self.state
        return (state.wants_plan or state.now_s >= state.again_s) and self._may_plan()

    def _may_plan(self) -> bool:
        """Whether all coordinators that could report after a restart have done so."""
        state = self.state
        if not self._is_settled:
            is_late = state.now_s >= self._began_s + state.settings.settle_s
            self._is_settled = is_late or all(
                state.links[name].is_known
                for name, each in state.fleet.pipelines.items()
                if each.phase is PipelinePhase.ADMITTED and each.workers
            )
        return self._is_settled

    def _plan(self) -> None:
        state = self.state
        self.coordinators.fence_silent()
        note_turns(state)
        state.wants_plan, state.planned_s = False, state.now_s
        state.counts["plans"] += 1
        made = self._make()
        for op in made.ops:
            self.intents.promise(op)
        state.again_s = max(made.again_s, state.now_s + state.settings.tick_s)
        if made.credits:
            state.credits.gpu_s = made.credits
            for name, credit in made.credits.items():
                state.fleet.pipelines[name].credit_gpu_s = credit
        state.fleet.credited_s = state.credits.credited_s = state.now_s
        state.fleet.fair_shares = made.fair_shares
        state.mark("credits", "1")

    def _make(self) -> GpuPlan:
        """Make a plan; if the policy fails, one without it, and retry soon."""
        state, spare = self.state, FixedOnly(self.policy.reserve_after_s)
        made = self._try(self.policy, "no plan of generation")
        if made is None:
            made = self._try(spare, "no plan") or GpuPlan()
            again_s = min(made.again_s, state.now_s + state.settings.settle_s)
            made = msgspec.structs.replace(made, again_s=again_s)
        return made

    def _try(self, policy: SchedulingPolicy, what: str) -> GpuPlan | None:
        try:
            return plan(self.state.fleet, policy)
        except Exception as error:  # noqa: BLE001 - door: one bad plan must not end the fleet
            self.state.report_problem(f"{what}: {type(error).__name__}: {error}")
            return None

    # messages

    def _on_report(self, _: bytes, report: ReportProgress) -> None:
        self.demands.on_report(report)

    def _on_clear(self, _: bytes, clear: ClearProgress) -> None:
        if self.demands.on_clear(clear):
            self.tickets.close_generation(clear.pipeline_id)

    def _on_preempt(self, _: bytes, __: ReportPreempt) -> None:
        self.state.counts["preempted_rollouts"] += 1

    def _on_resized(self, _: bytes, resized: WorkersResized) -> None:
        self.coordinators.on_resized(resized)

    def _on_beat(self, _: bytes, beat: NodeBeat) -> None:
        self.registry.on_beat(beat)

    def _on_read(self, route: bytes, ask: ReadScheduler) -> None:
        seen = explain_fleet(self.state.fleet, self.explain_context(), ask.pipeline_id)
        answer = SchedulerAnswered(ask.key, not seen.error, seen.error)
        self.state.send(route, answer, msgspec.json.encode(seen))

    def _on_tick(self) -> None:
        self.tickets.on_tick()
        self.registry.on_tick()
        self.coordinators.on_tick()
        self.state.wants_plan |= note_turns(self.state)
        for pipeline in self.state.fleet.pipelines.values():
            if self.demands.is_stalled(pipeline):
                gpus = pipeline.spec.generation
                self.demands.log_stalled(holders(self.state, gpus), pipeline)
