"""Tickets: requests and releases with a key, their grants, and the messages about them.

    generation       QUEUED -> GRANTED -> RELEASED
    a fixed cluster  QUEUED -> OFFERED -> GRANTED -> RELEASED
    either           QUEUED, OFFERED -> REFUSED | WITHDRAWN <-> QUEUED (expired, then renewed)

    client                the scheduler            the GPUs
    RequestGpus     --->  QUEUED                   in use by others
                    <---  OFFERED, offer n         reserved for the client
    TakeGpus n      --->  GRANTED, journalled      the client's until it releases them
    computes        <---  GRANTED

- A client may use a fixed cluster only after it has received GRANTED. So an offer may expire after
  `patience_s` without renewal, and a grant never does. Offers are numbered, so that a delayed
  TakeGpus does not take a later one.
- Repeating a request renews it and is answered with its status. A second request for the same
  cluster joins the first. A cluster has one place in the queue, as long as one open ticket has.
- A queued or offered ticket that is not renewed for `patience_s` is withdrawn silently; a late
  renewal restores it. Ended tickets are remembered for `memory_s`, so that a delayed copy is not
  carried out again.
"""

from collections.abc import Container

from rollmesh.scheduler.planning.plan import ReleaseCluster, ShrinkReason, apply
from rollmesh.scheduler.planning.state import (
    FIXED,
    ClusterRequest,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.scheduler.service.demands import DemandTracker
from rollmesh.scheduler.service.intents import Intents, is_at_rest
from rollmesh.scheduler.service.state import ReplyTarget, SchedulerState, TicketRecord
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RequestGpus,
    TakeGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
    WorkerPhase,
)

GpuRequest = RequestGpus | NotifyReleaseThenRequestGpus
TicketRequest = GpuRequest | NotifyReleaseGpus
_RESERVED = frozenset(map(str, ShrinkReason))
"""Values of Shrink.for_ that are not keys."""


def refusal(state: SchedulerState, ask: TicketRequest) -> str:
    """Explain why a request can never be granted, in one line with the remedy; '' if it can.

    A release is refused only where nothing could ever be held.
    """
    if not ask.key or ask.key in _RESERVED:
        return f"{ask.key!r} is not a valid key; build it from pipeline, cluster and a number"
    pipeline = state.fleet.pipelines.get(ask.pipeline_id)
    if pipeline is None:
        return f"no pipeline {ask.pipeline_id!r} is registered; register and admit it first"
    if pipeline.phase is PipelinePhase.REGISTERED:
        return f"{ask.pipeline_id} is registered and not admitted; admit it first"
    released = getattr(ask, "release_cluster", ask.cluster)
    for cluster in (ask.cluster, released):
        if cluster != GENERATION_CLUSTER and cluster not in pipeline.spec.clusters:
            names = ", ".join([*pipeline.spec.clusters, GENERATION_CLUSTER])
            return f"{ask.pipeline_id} has no cluster {cluster!r}; it has {names}"
    if isinstance(ask, NotifyReleaseGpus):
        return ""
    if pipeline.phase is PipelinePhase.LEAVING:
        return f"{ask.pipeline_id} is leaving"
    return _mismatch(state, pipeline, ask)


def _mismatch(state: SchedulerState, pipeline: PipelineState, ask: GpuRequest) -> str:
    is_generation = ask.cluster == GENERATION_CLUSTER
    if is_generation != (ask.priority == GpuPriority.GENERATION) or ask.priority < 0:
        return (
            f"{ask.cluster} cannot be requested with priority {ask.priority}: "
            f"{int(GpuPriority.GENERATION)} is for {GENERATION_CLUSTER}, and only that"
        )
    if ask.priority > GpuPriority.GENERATION:
        return f"there is no priority {ask.priority}; the last is {int(GpuPriority.GENERATION)}"
    if is_generation and not pipeline.workers:
        return f"{pipeline.pipeline_id} has no engines; register it with GPUs for generation"
    if is_generation and not state.pipeline_records[pipeline.pipeline_id].is_wired:
        return (
            f"the hooks of {pipeline.pipeline_id} are not wired, so its progress would not be "
            "reported; create its PipelineHooks before it generates"
        )
    return ""


class TicketQueue:
    def __init__(self, state: SchedulerState, demands: DemandTracker, intents: Intents) -> None:
        self._state = state
        self._demands = demands
        self._intents = intents
        self._to_notify: dict[str, None] = {}

    # requests

    def on_ask(self, route: bytes, ask: TicketRequest) -> None:
        """Handle a new request or a renewal."""
        state, known = self._state, self._state.tickets.get(ask.key)
        if known and _is_another(known, ask):
            why = f"{ask.key!r} is the key of another request; give each its own key"
            state.send(route, TicketMoved(ask.key, TicketState.REFUSED, reason=why))
            return
        state.reply_targets[ask.key] = ReplyTarget(route, state.now_s)
        self._to_notify[ask.key] = None
        if known:
            if known.is_expired:
                self._take_up(known, ask)
            return
        ticket = TicketRecord(
            key=ask.key, pipeline_id=ask.pipeline_id, cluster=ask.cluster, asked_s=state.now_s
        )
        ticket.gives_up = isinstance(ask, NotifyReleaseGpus)
        state.tickets[ask.key] = ticket
        state.mark("tickets", ask.key)
        if why := refusal(self._state, ask):
            self._refuse(ticket, ask, why)
            return
        state.counts["asks"] += 1
        if isinstance(ask, NotifyReleaseGpus):
            self._give_up(ticket)
            return
        if isinstance(ask, NotifyReleaseThenRequestGpus):
            self.release(ask.pipeline_id, ask.release_cluster, ask.key)
        self._request(ticket, ask)

    def _refuse(self, ticket: TicketRecord, ask: TicketRequest, why: str) -> None:
        """Refuse it; a leaving pipeline still releases what the request releases."""
        self._close(ticket, TicketState.REFUSED, why)
        pipeline = self._state.fleet.pipelines.get(ask.pipeline_id)
        if pipeline and pipeline.phase is PipelinePhase.LEAVING:
            released = getattr(ask, "release_cluster", None)
            if released in pipeline.holds:
                self.release(ask.pipeline_id, released, ask.key)

    def _take_up(self, ticket: TicketRecord, ask: TicketRequest) -> None:
        """Restore an expired ticket; what it released with its request stays released."""
        assert not isinstance(ask, NotifyReleaseGpus)
        ticket.is_expired, ticket.state = False, TicketState.QUEUED
        self._state.mark("tickets", ticket.key)
        if why := refusal(self._state, ask):
            self._close(ticket, TicketState.REFUSED, why)
        else:
            self._request(ticket, ask)

    def on_take(self, route: bytes, take: TakeGpus) -> None:
        """Grant an offer that its client takes; an expired one is reported by the next renewal."""
        state = self._state
        ticket = state.tickets.get(take.key)
        if ticket is None or ticket.is_expired:
            return
        state.reply_targets[take.key] = ReplyTarget(route, state.now_s)
        self._to_notify[take.key] = None
        if ticket.state is TicketState.OFFERED and take.offer == ticket.offer:
            self._grant(ticket)

    def on_withdraw(self, route: bytes, ask: WithdrawRequest) -> None:
        """Withdraw a request whose client has lost interest and may not know yet that it was
        granted."""
        state = self._state
        state.reply_targets[ask.key] = ReplyTarget(route, state.now_s)
        self._to_notify[ask.key] = None
        ticket = state.tickets.get(ask.key)
        if ticket is None:  # it overtook its request, which is then too late
            ticket = TicketRecord(key=ask.key, pipeline_id="", cluster="", asked_s=state.now_s)
            state.tickets[ask.key] = ticket
            self._close(ticket, TicketState.WITHDRAWN)
        elif ticket.is_expired:
            ticket.is_expired = False
            state.mark("tickets", ask.key)
        elif ticket.is_waiting and not ticket.gives_up:
            self._withdraw(ticket)
        elif ticket.state is TicketState.GRANTED and ticket.cluster != GENERATION_CLUSTER:
            if len(self._open(ticket.pipeline_id, ticket.cluster)) > 1:
                self._close(
                    ticket, TicketState.RELEASED
                )  # another ticket that joined it still holds it
            else:
                self.release(ticket.pipeline_id, ticket.cluster, ask.key)

    def _request(
        self, ticket: TicketRecord, ask: RequestGpus | NotifyReleaseThenRequestGpus
    ) -> None:
        state = self._state
        pipeline = state.fleet.pipelines[ticket.pipeline_id]
        self._enqueue(ticket)
        if ticket.cluster == GENERATION_CLUSTER:
            self._demands.open(pipeline, ask.key, ask.step_target_estimate, ask.global_step)
            return
        hold = pipeline.holds.get(ticket.cluster)
        if hold is not None and not self._intents.is_promise(pipeline.pipeline_id, hold.cluster):
            self._offer(ticket)
        elif hold is None and not self._place(ticket):
            state.numbers.seq += 1
            state.fleet.requests[ask.key] = ClusterRequest(
                key=ask.key,
                pipeline_id=ticket.pipeline_id,
                cluster=ticket.cluster,
                priority=ask.priority,
                seq=state.numbers.seq,
                asked_s=state.now_s,
            )
            state.mark("requests", ask.key)
            state.wants_plan = True

    def _place(self, ticket: TicketRecord) -> ClusterRequest | None:
        """The request of its cluster in the queue."""
        for request in self._state.fleet.requests.values():
            if (request.pipeline_id, request.cluster) == (ticket.pipeline_id, ticket.cluster):
                return request
        return None

    # releases

    def _give_up(self, ticket: TicketRecord) -> None:
        self._enqueue(ticket)
        self.release(ticket.pipeline_id, ticket.cluster, ticket.key)
        if ticket.cluster != GENERATION_CLUSTER:
            self._close(ticket, TicketState.RELEASED)

    def release(self, pipeline_id: str, cluster: str, key: str) -> None:
        """Take a cluster back, or remove it from the queue; generation when its workers are
        asleep."""
        state = self._state
        pipeline = state.fleet.pipelines[pipeline_id]
        state.wants_plan = True
        if cluster == GENERATION_CLUSTER:
            self._demands.close(pipeline)
            self._close_all(pipeline_id, cluster, TicketState.WITHDRAWN)
            self._intents.call_off(pipeline_id, "generation was released")
            pipeline.releasing[cluster] = state.pipeline_records[pipeline_id].releasing = key
            state.mark("pipelines", pipeline_id)
            return
        self._close_all(pipeline_id, cluster, TicketState.WITHDRAWN)
        self.take_back(pipeline_id, cluster)

    def take_back(self, pipeline_id: str, cluster: str) -> None:
        """Free a fixed cluster and cancel its requests and promises."""
        state = self._state
        for key, request in list(state.fleet.requests.items()):
            if (request.pipeline_id, request.cluster) == (pipeline_id, cluster):
                del state.fleet.requests[key]
                state.mark("requests", key)
        self._intents.drop_promise(pipeline_id, cluster)
        pipeline = state.fleet.pipelines[pipeline_id]
        if cluster in pipeline.holds:
            apply(state.fleet, ReleaseCluster(pipeline_id, cluster))
            state.clear(Owner(pipeline_id, cluster, FIXED), pipeline.spec.clusters[cluster])
            state.mark("holds", pipeline_id, cluster)
        state.wants_plan = True

    def settle_releases(self) -> None:
        """Complete releases of generation whose workers are asleep."""
        state = self._state
        for pipeline_id, record in state.pipeline_records.items():
            if not record.releasing:
                continue
            pipeline = state.fleet.pipelines[pipeline_id]
            if not all(is_at_rest(state, each) for each in pipeline.workers):
                continue
            record.releasing = ""
            pipeline.releasing.pop(GENERATION_CLUSTER, None)
            state.mark("pipelines", pipeline_id)
            state.wants_plan = True
            for ticket in self._open(pipeline_id, GENERATION_CLUSTER):
                if ticket.gives_up:
                    self._close(ticket, TicketState.RELEASED)

    # grants

    def settle_grants(self) -> None:
        """Grant generation where a worker is awake, and offer promised clusters that are clear."""
        state = self._state
        for pipeline_id, cluster in list(state.queue):
            pipeline = state.fleet.pipelines[pipeline_id]
            if cluster == GENERATION_CLUSTER:
                has_it = not pipeline.releasing and bool(awake_gpus(pipeline))
            else:
                is_promise = self._intents.is_promise(pipeline_id, cluster)
                has_it = cluster in pipeline.holds and not is_promise
            if not has_it:
                continue
            for ticket in self._open(pipeline_id, cluster):
                if ticket.state is TicketState.QUEUED and not ticket.gives_up:
                    settle = self._grant if cluster == GENERATION_CLUSTER else self._offer
                    settle(ticket)

    def _offer(self, ticket: TicketRecord) -> None:
        state = self._state
        state.numbers.seq += 1
        ticket.state, ticket.offer = TicketState.OFFERED, state.numbers.seq
        state.mark("tickets", ticket.key)
        self._to_notify[ticket.key] = None

    def _grant(self, ticket: TicketRecord) -> None:
        state = self._state
        if ticket.cluster != GENERATION_CLUSTER:
            pipeline = state.fleet.pipelines[ticket.pipeline_id]
            self._demands.note_grant(pipeline, ticket.cluster)
        ticket.state = TicketState.GRANTED
        state.waits_s.append(state.now_s - ticket.asked_s)
        state.counts["grants"] += 1
        state.mark("tickets", ticket.key)
        self._to_notify[ticket.key] = None

    def is_taken(self, pipeline_id: str, cluster: str) -> bool:
        """Whether a client may be using the cluster; an offered one is not in use."""
        tickets = self._open(pipeline_id, cluster)
        return not tickets or any(each.state is TicketState.GRANTED for each in tickets)

    # ends

    def close_generation(self, pipeline_id: str) -> None:
        """Close the tickets of a demand that has ended by itself."""
        for ticket in self._open(pipeline_id, GENERATION_CLUSTER):
            if not ticket.gives_up:
                is_held = ticket.state is TicketState.GRANTED
                self._close(ticket, TicketState.RELEASED if is_held else TicketState.WITHDRAWN)

    def refuse_all(self, pipeline_id: str, why: str, but: Container[str] = ()) -> None:
        """Refuse the tickets of a pipeline that leaves, except those of these clusters."""
        for of_pipeline, cluster in list(self._state.queue):
            if of_pipeline == pipeline_id and cluster not in but:
                self._close_all(pipeline_id, cluster, TicketState.REFUSED, why)

    def _close_all(
        self, pipeline_id: str, cluster: str, queued: TicketState, why: str = ""
    ) -> None:
        """Close open tickets: granted ones as RELEASED, others as `queued`; releases continue."""
        for ticket in self._open(pipeline_id, cluster):
            is_held = ticket.state is TicketState.GRANTED
            if is_held or (ticket.gives_up and queued is TicketState.REFUSED):
                self._close(ticket, TicketState.RELEASED)
            elif not ticket.gives_up:
                self._close(ticket, queued, why)

    def _withdraw(self, ticket: TicketRecord) -> None:
        """Close the ticket; the last one gives up the place in the queue, but a demand for
        generation stays."""
        self._close(ticket, TicketState.WITHDRAWN)
        is_last = not self._open(ticket.pipeline_id, ticket.cluster)
        if is_last and ticket.cluster != GENERATION_CLUSTER:
            self.take_back(ticket.pipeline_id, ticket.cluster)

    def _close(self, ticket: TicketRecord, end_state: TicketState, reason: str = "") -> None:
        state = self._state
        ticket.state, ticket.reason, ticket.closed_s = end_state, reason, state.now_s
        self._to_notify[ticket.key] = None
        state.mark("tickets", ticket.key)
        keys = state.queue.get((ticket.pipeline_id, ticket.cluster), {})
        keys.pop(ticket.key, None)
        if not keys:
            state.queue.pop((ticket.pipeline_id, ticket.cluster), None)

    def _enqueue(self, ticket: TicketRecord) -> None:
        line = self._state.queue.setdefault((ticket.pipeline_id, ticket.cluster), {})
        line[ticket.key] = None

    def _open(self, pipeline_id: str, cluster: str) -> list[TicketRecord]:
        keys = self._state.queue.get((pipeline_id, cluster), {})
        return [self._state.tickets[key] for key in keys]

    # time

    def on_tick(self) -> None:
        """Withdraw tickets that were not renewed, and forget those that ended long ago."""
        state, settings = self._state, self._state.settings
        forget_s = state.now_s - settings.memory_s
        patience_s = state.now_s - settings.patience_s
        for key, ticket in list(state.tickets.items()):
            last_seen_s = state.reply_targets[key].last_seen_s
            if not ticket.is_open and max(last_seen_s, ticket.closed_s) < forget_s:
                del state.tickets[key], state.reply_targets[key]
                state.mark("tickets", key)
            elif ticket.is_waiting and last_seen_s < patience_s:
                self._expire(ticket)
            elif ticket.state is TicketState.GRANTED and last_seen_s < forget_s:
                self._forget_grant(ticket)

    def _expire(self, ticket: TicketRecord) -> None:
        """Withdraw a ticket that was not renewed; what it released stays released."""
        if not ticket.gives_up:
            self._state.counts["withdrawn"] += 1
            ticket.is_expired = True
            self._withdraw(ticket)
            del self._to_notify[ticket.key]

    def _forget_grant(self, ticket: TicketRecord) -> None:
        """Close an old grant of generation: each rollout may have one, and the demand itself
        remains."""
        if ticket.cluster == GENERATION_CLUSTER:
            self._close(ticket, TicketState.RELEASED)
            del self._to_notify[ticket.key]

    # notifications

    def notify(self) -> None:
        """Send the status of tickets that changed or were asked about."""
        state = self._state
        for key in self._to_notify:
            ticket = state.tickets[key]
            gpus: tuple[int, ...] = ()
            reason = ticket.reason
            if ticket.state in (TicketState.GRANTED, TicketState.OFFERED):
                gpus = self._gpus(ticket)
            elif ticket.state is TicketState.QUEUED:
                reason = self._why(ticket)
            moved = TicketMoved(key, ticket.state, gpus, reason, ticket.offer)
            state.send(state.reply_targets[key].route, moved)
        self._to_notify = {}

    def _gpus(self, ticket: TicketRecord) -> tuple[int, ...]:
        pipeline = self._state.fleet.pipelines[ticket.pipeline_id]
        if ticket.cluster == GENERATION_CLUSTER:
            return awake_gpus(pipeline)
        return pipeline.spec.clusters[ticket.cluster]

    def _why(self, ticket: TicketRecord) -> str:
        """Explain in one line why it waits."""
        state = self._state
        pipeline = state.fleet.pipelines[ticket.pipeline_id]
        if pipeline.phase is PipelinePhase.QUARANTINED:
            why = state.pipeline_records[ticket.pipeline_id].why
            return f"{ticket.pipeline_id} is quarantined: {why}"
        if ticket.gives_up:
            return "its workers go to sleep"
        is_generation = ticket.cluster == GENERATION_CLUSTER
        spec = pipeline.spec
        gpus = spec.generation if is_generation else spec.clusters[ticket.cluster]
        return f"waits for {holders(state, gpus) or 'its turn'}"


def awake_gpus(pipeline: PipelineState) -> tuple[int, ...]:
    """GPUs of its awake workers."""
    awake = (each for each in pipeline.workers if each.phase is WorkerPhase.AWAKE)
    return tuple(gpu for each in awake for gpu in each.gpus)


def holders(state: SchedulerState, gpus: tuple[int, ...]) -> str:
    """Describe the owners that use these GPUs or are promised them."""
    found: dict[str, list[int]] = {}
    for gpu in gpus:
        owner = state.occupants.get(gpu) or state.fleet.owners.get(gpu)
        if owner:
            found.setdefault(f"{owner.pipeline_id}/{owner.cluster}", []).append(gpu)
    return "; ".join(f"{name} on {', '.join(map(str, on))}" for name, on in found.items())


def _is_another(ticket: TicketRecord, ask: TicketRequest) -> bool:
    """Whether the ticket belongs to another request; one that a withdrawal overtook matches any."""
    asked = (ask.pipeline_id, ask.cluster, isinstance(ask, NotifyReleaseGpus))
    return bool(ticket.pipeline_id) and asked != (
        ticket.pipeline_id,
        ticket.cluster,
        ticket.gives_up,
    )
