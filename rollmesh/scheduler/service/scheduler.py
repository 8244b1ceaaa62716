"""The scheduler's machine: what is heard goes to its part, then is planned, carried out and told.

    tickets.py       asks with a key, and who waits      demands.py        who wants to generate
    intents.py       ops under way, until they are so    coordinators.py   what engines truly are
    tenants.py       pipelines and nodes                 book.py           what is known; its rows

Invariants: what a step has changed is in its Write, before any message of it; a plan that fails is
told, fixed clusters go on without the policy, and the next event plans again; a step that changes
nothing a plan looks at makes none. After a restart nothing is planned until every coordinator has
said its truth, or `settle_s` has gone by. Pure: no clock, no socket. Driven by process.py and by
the simulator, with a tick at least every `tick_s`.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from rollmesh.scheduler.planning.plan import GpuPlan
from rollmesh.scheduler.planning.planner import FixedOnly, SchedulingPolicy, plan
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.actions import Action, Event
from rollmesh.scheduler.service.book import Book
from rollmesh.scheduler.service.coordinators import Coordinators
from rollmesh.scheduler.service.demands import Demands
from rollmesh.scheduler.service.explain import view
from rollmesh.scheduler.service.intents import Intents
from rollmesh.scheduler.service.known import Known, UnderWay
from rollmesh.scheduler.service.lately import told
from rollmesh.scheduler.service.lateness import limit_s, note_turns
from rollmesh.scheduler.service.records import Intent, Revived
from rollmesh.scheduler.service.revival import revive
from rollmesh.scheduler.service.settings import SchedulerSettings
from rollmesh.scheduler.service.tenants import Tenants
from rollmesh.scheduler.service.tickets import Tickets, holders
from rollmesh.scheduler.service.tokens import Tokens
from rollmesh.wire.machine import Ticked
from rollmesh.wire.scheduling import (
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
    TakeGpus,
    UndrainNode,
    UnregisterPipeline,
    WithdrawRequest,
    WorkersResized,
)

_QUIET = frozenset({"progress", "credits", "numbers"})
"""Tables that nobody waits for a change of."""
MAX_TICKS = 4
"""Without a step for longer, we were held up: who was silent meanwhile may have spoken. That is
forgiven once in a grace: a loop that is always slow hears at each turn who has spoken."""
ROUNDS = 3
"""What a plan frees at once may be planned for in the same step; the rest in the next."""


class Scheduler:
    """See the module; `book` is its read-only view. A test may put a broken part in one's place."""

    DEMANDS: ClassVar[type[Demands]] = Demands
    INTENTS: ClassVar[type[Intents]] = Intents
    TICKETS: ClassVar[type[Tickets]] = Tickets
    COORDINATORS: ClassVar[type[Coordinators]] = Coordinators
    TENANTS: ClassVar[type[Tenants]] = Tenants

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: SchedulingPolicy,
        revived: Revived | None = None,
        incarnation: str = "",
        operator_hash: str = "",
    ) -> None:
        """Continue from `revived`, if it is given; `incarnation` differs from any before.

        `operator_hash` is that of the operator's token (tokens.py).
        """
        self.policy = policy
        self.book = revive(Book(settings, incarnation), revived or Revived())
        self.demands = self.DEMANDS(self.book)
        self.intents = self.INTENTS(self.book)
        self.tickets = self.TICKETS(self.book, self.demands, self.intents)
        self.coordinators = self.COORDINATORS(self.book, self.intents)
        self.tenants = self.TENANTS(self.book, self.tickets, self.demands, self.intents)
        self._tokens = Tokens(self.book, operator_hash)
        self._has_begun = False
        self._began_s, self._forgiven_s = 0.0, -math.inf
        self._is_settled = revived is None
        self._has_moved = True
        """Since somebody last looked whether anything can be done."""
        self._handlers: dict[type, Callable[[bytes, Any], object]] = {
            HooksWired: self.tenants.on_wired,
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
            RegisterPipeline: self.tenants.on_ask,
            AdmitPipeline: self.tenants.on_ask,
            CheckKill: self.tenants.on_ask,
            KillPipeline: self.tenants.on_ask,
            UnregisterPipeline: self.tenants.on_ask,
            ClaimPipeline: self.tenants.on_ask,
            JoinNode: self.tenants.on_ask,
            DrainNode: self.tenants.on_ask,
            UndrainNode: self.tenants.on_ask,
            NodeBeat: self._on_beat,
            ReadScheduler: self._on_read,
        }

    def step(self, event: Event, now_s: float, is_last: bool = True) -> list[Action]:
        """Take one event; what is foreign changes nothing. Time does not run back here.

        Of events that have come at once, only the `is_last` makes a plan.
        """
        self._start(now_s)
        if isinstance(event, Ticked):
            self._on_tick()
        elif (handler := self._handlers.get(type(event.message))) and not self._tokens.is_refused(
            event.route, event.message
        ):
            handler(event.route, event.message)
        self._has_moved |= self.book.has_moved(_QUIET)
        if is_last:
            self._settle()
        self.tickets.tell()
        return self.book.take()

    @property
    def due_s(self) -> float:
        """When a plan is due, if time alone may bring one."""
        return self.book.again_s if self._is_settled else math.inf

    def known(self) -> Known:
        """What explain.py needs beside the state."""
        book = self.book
        return Known(
            scheduler=book.incarnation,
            policy=self.policy.name,
            reserve_after_s=self.policy.reserve_after_s,
            again_s=book.again_s,
            under_way=tuple(
                UnderWay(
                    pipeline_id=intent.pipeline_id,
                    cluster=intent.cluster,
                    rank=intent.rank,
                    stage=intent.phase.value,
                    since_s=intent.planned_s,
                    until_s=intent.until_s,
                )
                for intent in book.intents.values()
            ),
            driven=self.coordinators.driven(),
            runs={name: each.run for name, each in book.tenants.items() if each.run},
            faults={name: each.why for name, each in book.tenants.items() if each.why},
            retry_s={name: book.links[name].retry_s for name, t in book.tenants.items() if t.why},
            lately=told(book.ended.values(), book.now_s),
            troubles=tuple(book.troubles),
        )

    # the end of a step

    def _start(self, now_s: float) -> None:
        """Whose silence is ours is forgiven: we begin, or were held up ourselves."""
        book, before_s = self.book, self.book.now_s
        book.now_s = book.state.now_s = max(now_s, before_s)
        if not self._has_begun:
            self._has_begun, self._began_s = True, book.now_s
            for intent in book.intents.values():
                if intent.resize_id:  # nobody may have heard of it: it has its time anew
                    for_s = limit_s(book.settings, intent.kind) + book.settings.slack_s
                    self._defer(intent, book.now_s + for_s)
            self._forgive(math.inf)
        elif self._was_held_up(before_s):
            self._forgiven_s = book.now_s
            for intent in book.intents.values():
                if intent.resize_id:
                    self._defer(intent, intent.until_s + book.now_s - before_s)
            self._forgive(book.now_s - before_s)

    def _was_held_up(self, before_s: float) -> bool:
        settings = self.book.settings
        grace_s = max(settings.coordinator_grace_s, settings.node_grace_s, settings.patience_s)
        gap_s = self.book.now_s - before_s
        return gap_s > MAX_TICKS * settings.tick_s and before_s >= self._forgiven_s + grace_s

    def _defer(self, intent: Intent, until_s: float) -> None:
        intent.until_s = until_s
        self.book.mark("intents", intent.intent_id)

    def _forgive(self, gap_s: float) -> None:
        """Nobody could be heard for so long."""
        book, now_s = self.book, self.book.now_s
        for asker in book.askers.values():
            asker.heard_s = min(now_s, asker.heard_s + gap_s)
        for link in book.links.values():
            link.heard_s = min(now_s, link.heard_s + gap_s)
            link.progressed_s = min(now_s, link.progressed_s + gap_s)
        for name in book.machines:
            book.beats_s[name] = min(now_s, book.beats_s.get(name, now_s) + gap_s)

    def _settle(self) -> None:
        """Plan if something asks for it, do what can be done, say who has what now."""
        book = self.book
        if not (self._is_due() or self._has_moved):
            return
        self._has_moved = False
        for _ in range(ROUNDS):
            if self._is_due():
                self._plan()
            self.intents.drive()
            self.tickets.settle_grants()
            self.tickets.settle_releases()
            self.tenants.settle_leavers()
            if not book.wants_plan:
                break

    def _is_due(self) -> bool:
        book = self.book
        return (book.wants_plan or book.now_s >= book.again_s) and self._may_plan()

    def _may_plan(self) -> bool:
        """Not before those have said their truth who can."""
        book = self.book
        if not self._is_settled:
            is_late = book.now_s >= self._began_s + book.settings.settle_s
            self._is_settled = is_late or all(
                book.links[name].is_known
                for name, each in book.state.pipelines.items()
                if each.phase is PipelinePhase.ADMITTED and each.workers
            )
        return self._is_settled

    def _plan(self) -> None:
        book = self.book
        self.coordinators.fence_silent()
        note_turns(book)
        book.wants_plan, book.planned_s = False, book.now_s
        book.num["plans"] += 1
        made = self._make()
        for op in made.ops:
            self.intents.promise(op)
        book.again_s = max(made.again_s, book.now_s + book.settings.tick_s)
        if made.credits:
            book.credits.gpu_s = made.credits
            for name, credit in made.credits.items():
                book.state.pipelines[name].credit_gpu_s = credit
        book.state.credited_s = book.credits.credited_s = book.now_s
        book.state.fair_shares = made.fair_shares
        book.mark("credits", "1")

    def _make(self) -> GpuPlan:
        """A plan. Where the policy is wrong, one without it: fixed clusters go on, and both are
        tried again."""
        book, spare = self.book, FixedOnly(self.policy.reserve_after_s)
        made = self._try(self.policy, "no plan of generation")
        if made is None:
            made = self._try(spare, "no plan") or GpuPlan()
            again_s = min(made.again_s, book.now_s + book.settings.settle_s)
            made = msgspec.structs.replace(made, again_s=again_s)
        return made

    def _try(self, policy: SchedulingPolicy, what: str) -> GpuPlan | None:
        try:
            return plan(self.book.state, policy)
        except Exception as error:  # noqa: BLE001 - door: one bad plan must not end the fleet
            self.book.problem(f"{what}: {type(error).__name__}: {error}")
            return None

    # what is heard

    def _on_report(self, _: bytes, report: ReportProgress) -> None:
        self.demands.on_report(report)

    def _on_clear(self, _: bytes, clear: ClearProgress) -> None:
        if self.demands.on_clear(clear):
            self.tickets.close_generation(clear.pipeline_id)

    def _on_preempt(self, _: bytes, __: ReportPreempt) -> None:
        self.book.num["preempted_rollouts"] += 1

    def _on_resized(self, _: bytes, resized: WorkersResized) -> None:
        self.coordinators.on_resized(resized)

    def _on_beat(self, _: bytes, beat: NodeBeat) -> None:
        self.tenants.on_beat(beat)

    def _on_read(self, route: bytes, ask: ReadScheduler) -> None:
        seen = view(self.book.state, self.known(), ask.pipeline_id)
        answer = SchedulerAnswered(ask.key, not seen.error, seen.error)
        self.book.send(route, answer, msgspec.json.encode(seen))

    def _on_tick(self) -> None:
        self.tickets.on_tick()
        self.tenants.on_tick()
        self.coordinators.on_tick()
        self.book.wants_plan |= note_turns(self.book)
        for pipeline in self.book.state.pipelines.values():
            if self.demands.is_stalled(pipeline):
                gpus = pipeline.spec.generation
                self.demands.tell_stalled(holders(self.book, gpus), pipeline)
