"""Asks with a key: who waits for what, who has it, and what they are told.

    generation       QUEUED -> GRANTED -> RELEASED
    a fixed cluster  QUEUED -> OFFERED -> GRANTED -> RELEASED
    either           QUEUED, OFFERED -> REFUSED | WITHDRAWN <-> QUEUED (forsaken, taken up)

    whoever asks          the scheduler            their GPUs
    RequestGpus     --->  QUEUED                   somebody's
                    <---  OFFERED, offer n         kept: the ticket waits for its asker
    TakeGpus n      --->  GRANTED, on the disk     his, until he gives them up
    computes        <---  GRANTED

Who asks for a fixed cluster computes there only when he is told GRANTED. So an offer may lapse: who
was offered GPUs and died, or is not heard for `patience_s`, has never had them; and a grant never
lapses: who was told of one may be computing, however long he is not heard. An offer has a number,
so that what a dead asker still had on its way does not take a later one.

An ask that is said again is its renewal, and is answered by how its ticket stands; a second ask for
what somebody of that pipeline waits for, or has, joins it. Invariants: a fixed cluster has one
place in the line, which is there as long as one open ticket is; a ticket that is queued or offered
and that nobody renews for `patience_s` is withdrawn, told to nobody, and leaves nothing: who was
but held up, and says it again, waits again, for he would take its end for a grant; what has ended
is known for `memory_s`, so that a late copy of an ask is not done anew. Driven by scheduler.py.
"""

from collections.abc import Container

from rollmesh.scheduler.planning.plan import ReleaseCluster, apply
from rollmesh.scheduler.planning.state import (
    FIXED,
    ClusterRequest,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.scheduler.service.book import Asker, Book
from rollmesh.scheduler.service.demands import Demands
from rollmesh.scheduler.service.intents import Intents, rests
from rollmesh.scheduler.service.records import Ticket
from rollmesh.scheduler.service.refusals import Ask, refusal
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RequestGpus,
    TakeGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
    WorkerPhase,
)


class Tickets:
    """See the module."""

    def __init__(self, book: Book, demands: Demands, intents: Intents) -> None:
        self._book = book
        self._demands = demands
        self._intents = intents
        self._to_tell: dict[str, None] = {}

    # asks

    def on_ask(self, route: bytes, ask: Ask) -> None:
        """New, or said again."""
        book, known = self._book, self._book.tickets.get(ask.key)
        if known and _is_another(known, ask):
            why = f"{ask.key!r} is the key of another ask; give each a key of its own"
            book.send(route, TicketMoved(ask.key, TicketState.REFUSED, reason=why))
            return
        book.askers[ask.key] = Asker(route, book.now_s)
        self._to_tell[ask.key] = None
        if known:
            if known.is_forsaken:
                self._take_up(known, ask)
            return
        ticket = Ticket(
            key=ask.key, pipeline_id=ask.pipeline_id, cluster=ask.cluster, asked_s=book.now_s
        )
        ticket.gives_up = isinstance(ask, NotifyReleaseGpus)
        book.tickets[ask.key] = ticket
        book.mark("tickets", ask.key)
        if why := refusal(self._book, ask):
            self._refuse(ticket, ask, why)
            return
        book.num["asks"] += 1
        if isinstance(ask, NotifyReleaseGpus):
            self._give_up(ticket)
            return
        if isinstance(ask, NotifyReleaseThenRequestGpus):
            self.release(ask.pipeline_id, ask.release_cluster, ask.key)
        self._request(ticket, ask)

    def _refuse(self, ticket: Ticket, ask: Ask, why: str) -> None:
        """Whose pipeline is leaving gives up none the less what he gives up with it."""
        self._close(ticket, TicketState.REFUSED, why)
        pipeline = self._book.state.pipelines.get(ask.pipeline_id)
        if pipeline and pipeline.phase is PipelinePhase.LEAVING:
            released = getattr(ask, "release_cluster", None)
            if released in pipeline.holds:
                self.release(ask.pipeline_id, released, ask.key)

    def _take_up(self, ticket: Ticket, ask: Ask) -> None:
        """Who asked was held up, and waits still; what he gave up with it he gave up at once."""
        assert not isinstance(ask, NotifyReleaseGpus)
        ticket.is_forsaken, ticket.state = False, TicketState.QUEUED
        self._book.mark("tickets", ticket.key)
        if why := refusal(self._book, ask):
            self._close(ticket, TicketState.REFUSED, why)
        else:
            self._request(ticket, ask)

    def on_take(self, route: bytes, take: TakeGpus) -> None:
        """Whoever asked is there; of what has lapsed he hears by his next renewal."""
        book = self._book
        ticket = book.tickets.get(take.key)
        if ticket is None or ticket.is_forsaken:
            return
        book.askers[take.key] = Asker(route, book.now_s)
        self._to_tell[take.key] = None
        if ticket.state is TicketState.OFFERED and take.offer == ticket.offer:
            self._grant(ticket)

    def on_withdraw(self, route: bytes, ask: WithdrawRequest) -> None:
        """Whoever asked has lost interest, and may not know yet that it was granted."""
        book = self._book
        book.askers[ask.key] = Asker(route, book.now_s)
        self._to_tell[ask.key] = None
        ticket = book.tickets.get(ask.key)
        if ticket is None:  # it has overtaken its ask, which comes too late then
            ticket = Ticket(key=ask.key, pipeline_id="", cluster="", asked_s=book.now_s)
            book.tickets[ask.key] = ticket
            self._close(ticket, TicketState.WITHDRAWN)
        elif ticket.is_forsaken:
            ticket.is_forsaken = False
            book.mark("tickets", ask.key)
        elif ticket.is_waiting and not ticket.gives_up:
            self._withdraw(ticket)
        elif ticket.state is TicketState.GRANTED and ticket.cluster != GENERATION_CLUSTER:
            if len(self._open(ticket.pipeline_id, ticket.cluster)) > 1:
                self._close(ticket, TicketState.RELEASED)  # another that joined it has it still
            else:
                self.release(ticket.pipeline_id, ticket.cluster, ask.key)

    def _request(self, ticket: Ticket, ask: RequestGpus | NotifyReleaseThenRequestGpus) -> None:
        book = self._book
        pipeline = book.state.pipelines[ticket.pipeline_id]
        self._enqueue(ticket)
        if ticket.cluster == GENERATION_CLUSTER:
            self._demands.open(pipeline, ask.key, ask.step_target_estimate, ask.global_step)
            return
        hold = pipeline.holds.get(ticket.cluster)
        if hold is not None and not self._intents.is_promise(pipeline.pipeline_id, hold.cluster):
            self._offer(ticket)
        elif hold is None and not self._place(ticket):
            book.numbers.seq += 1
            book.state.requests[ask.key] = ClusterRequest(
                key=ask.key,
                pipeline_id=ticket.pipeline_id,
                cluster=ticket.cluster,
                priority=ask.priority,
                seq=book.numbers.seq,
                asked_s=book.now_s,
            )
            book.mark("requests", ask.key)
            book.wants_plan = True

    def _place(self, ticket: Ticket) -> ClusterRequest | None:
        """Its cluster's in the line."""
        for request in self._book.state.requests.values():
            if (request.pipeline_id, request.cluster) == (ticket.pipeline_id, ticket.cluster):
                return request
        return None

    # giving up

    def _give_up(self, ticket: Ticket) -> None:
        self._enqueue(ticket)
        self.release(ticket.pipeline_id, ticket.cluster, ticket.key)
        if ticket.cluster != GENERATION_CLUSTER:
            self._close(ticket, TicketState.RELEASED)

    def release(self, pipeline_id: str, cluster: str, key: str) -> None:
        """Take it back, or out of the line; of generation, when its workers are asleep."""
        book = self._book
        pipeline = book.state.pipelines[pipeline_id]
        book.wants_plan = True
        if cluster == GENERATION_CLUSTER:
            self._demands.close(pipeline)
            self._close_all(pipeline_id, cluster, TicketState.WITHDRAWN)
            self._intents.call_off(pipeline_id, "generation was released")
            pipeline.releasing[cluster] = book.tenants[pipeline_id].releasing = key
            book.mark("pipelines", pipeline_id)
            return
        self._close_all(pipeline_id, cluster, TicketState.WITHDRAWN)
        self.take_back(pipeline_id, cluster)

    def take_back(self, pipeline_id: str, cluster: str) -> None:
        """A fixed cluster has nothing, waits for nothing, and is promised nothing any more."""
        book = self._book
        for key, request in list(book.state.requests.items()):
            if (request.pipeline_id, request.cluster) == (pipeline_id, cluster):
                del book.state.requests[key]
                book.mark("requests", key)
        self._intents.drop_promise(pipeline_id, cluster)
        pipeline = book.state.pipelines[pipeline_id]
        if cluster in pipeline.holds:
            apply(book.state, ReleaseCluster(pipeline_id, cluster))
            book.clear(Owner(pipeline_id, cluster, FIXED), pipeline.spec.clusters[cluster])
            book.mark("holds", pipeline_id, cluster)
        book.wants_plan = True

    def settle_releases(self) -> None:
        """Generation that was given up has gone to sleep."""
        book = self._book
        for pipeline_id, tenant in book.tenants.items():
            if not tenant.releasing:
                continue
            pipeline = book.state.pipelines[pipeline_id]
            if not all(rests(book, each) for each in pipeline.workers):
                continue
            tenant.releasing = ""
            pipeline.releasing.pop(GENERATION_CLUSTER, None)
            book.mark("pipelines", pipeline_id)
            book.wants_plan = True
            for ticket in self._open(pipeline_id, GENERATION_CLUSTER):
                if ticket.gives_up:
                    self._close(ticket, TicketState.RELEASED)

    # grants

    def settle_grants(self) -> None:
        """Who waits for generation of a pipeline that has a worker awake has it; what was promised
        and is clear now is offered."""
        book = self._book
        for pipeline_id, cluster in list(book.queue):
            pipeline = book.state.pipelines[pipeline_id]
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

    def _offer(self, ticket: Ticket) -> None:
        book = self._book
        book.numbers.seq += 1
        ticket.state, ticket.offer = TicketState.OFFERED, book.numbers.seq
        book.mark("tickets", ticket.key)
        self._to_tell[ticket.key] = None

    def _grant(self, ticket: Ticket) -> None:
        book = self._book
        if ticket.cluster != GENERATION_CLUSTER:
            pipeline = book.state.pipelines[ticket.pipeline_id]
            self._demands.note_grant(pipeline, ticket.cluster)
        ticket.state = TicketState.GRANTED
        book.waits_s.append(book.now_s - ticket.asked_s)
        book.num["grants"] += 1
        book.mark("tickets", ticket.key)
        self._to_tell[ticket.key] = None

    def is_taken(self, pipeline_id: str, cluster: str) -> bool:
        """Whether somebody may compute on what it holds; what is but offered nobody has."""
        tickets = self._open(pipeline_id, cluster)
        return not tickets or any(each.state is TicketState.GRANTED for each in tickets)

    # ends

    def close_generation(self, pipeline_id: str) -> None:
        """Its demand has ended by itself."""
        for ticket in self._open(pipeline_id, GENERATION_CLUSTER):
            if not ticket.gives_up:
                state = ticket.state
                is_held = state is TicketState.GRANTED
                self._close(ticket, TicketState.RELEASED if is_held else TicketState.WITHDRAWN)

    def refuse_all(self, pipeline_id: str, why: str, but: Container[str] = ()) -> None:
        """Its pipeline is gone, or goes; tickets of these clusters stay."""
        for of_pipeline, cluster in list(self._book.queue):
            if of_pipeline == pipeline_id and cluster not in but:
                self._close_all(pipeline_id, cluster, TicketState.REFUSED, why)

    def _close_all(
        self, pipeline_id: str, cluster: str, queued: TicketState, why: str = ""
    ) -> None:
        """Open tickets end: granted ones as RELEASED, others as `queued`; releases go on."""
        for ticket in self._open(pipeline_id, cluster):
            is_held = ticket.state is TicketState.GRANTED
            if is_held or (ticket.gives_up and queued is TicketState.REFUSED):
                self._close(ticket, TicketState.RELEASED)
            elif not ticket.gives_up:
                self._close(ticket, queued, why)

    def _withdraw(self, ticket: Ticket) -> None:
        """Its place in the line goes with the last who waits; a demand for generation stays."""
        self._close(ticket, TicketState.WITHDRAWN)
        is_last = not self._open(ticket.pipeline_id, ticket.cluster)
        if is_last and ticket.cluster != GENERATION_CLUSTER:
            self.take_back(ticket.pipeline_id, ticket.cluster)

    def _close(self, ticket: Ticket, state: TicketState, reason: str = "") -> None:
        book = self._book
        ticket.state, ticket.reason, ticket.closed_s = state, reason, book.now_s
        self._to_tell[ticket.key] = None
        book.mark("tickets", ticket.key)
        keys = book.queue.get((ticket.pipeline_id, ticket.cluster), {})
        keys.pop(ticket.key, None)
        if not keys:
            book.queue.pop((ticket.pipeline_id, ticket.cluster), None)

    def _enqueue(self, ticket: Ticket) -> None:
        line = self._book.queue.setdefault((ticket.pipeline_id, ticket.cluster), {})
        line[ticket.key] = None

    def _open(self, pipeline_id: str, cluster: str) -> list[Ticket]:
        keys = self._book.queue.get((pipeline_id, cluster), {})
        return [self._book.tickets[key] for key in keys]

    # time

    def on_tick(self) -> None:
        """Withdraw what nobody renews, forget what has ended long ago."""
        book, settings = self._book, self._book.settings
        forget_s = book.now_s - settings.memory_s
        patience_s = book.now_s - settings.patience_s
        for key, ticket in list(book.tickets.items()):
            heard_s = book.askers[key].heard_s
            if not ticket.is_open and max(heard_s, ticket.closed_s) < forget_s:
                del book.tickets[key], book.askers[key]
                book.mark("tickets", key)
            elif ticket.is_waiting and heard_s < patience_s:
                self._forsake(ticket)
            elif ticket.state is TicketState.GRANTED and heard_s < forget_s:
                self._forget_grant(ticket)

    def _forsake(self, ticket: Ticket) -> None:
        """Nobody waits any more. What it gives up it gives up none the less."""
        if not ticket.gives_up:
            self._book.num["withdrawn"] += 1
            ticket.is_forsaken = True
            self._withdraw(ticket)
            del self._to_tell[ticket.key]

    def _forget_grant(self, ticket: Ticket) -> None:
        """Of generation its demand says all: there may be a grant of each rollout."""
        if ticket.cluster == GENERATION_CLUSTER:
            self._close(ticket, TicketState.RELEASED)
            del self._to_tell[ticket.key]

    # telling

    def tell(self) -> None:
        """How the tickets stand that have moved, or that somebody asked for."""
        book = self._book
        for key in self._to_tell:
            ticket = book.tickets[key]
            gpus: tuple[int, ...] = ()
            reason = ticket.reason
            if ticket.state in (TicketState.GRANTED, TicketState.OFFERED):
                gpus = self._gpus(ticket)
            elif ticket.state is TicketState.QUEUED:
                reason = self._why(ticket)
            moved = TicketMoved(key, ticket.state, gpus, reason, ticket.offer)
            book.send(book.askers[key].route, moved)
        self._to_tell = {}

    def _gpus(self, ticket: Ticket) -> tuple[int, ...]:
        pipeline = self._book.state.pipelines[ticket.pipeline_id]
        if ticket.cluster == GENERATION_CLUSTER:
            return awake_gpus(pipeline)
        return pipeline.spec.clusters[ticket.cluster]

    def _why(self, ticket: Ticket) -> str:
        """Why it waits, in one line."""
        book = self._book
        pipeline = book.state.pipelines[ticket.pipeline_id]
        if pipeline.phase is PipelinePhase.QUARANTINED:
            return f"{ticket.pipeline_id} is quarantined: {book.tenants[ticket.pipeline_id].why}"
        if ticket.gives_up:
            return "its workers go to sleep"
        is_generation = ticket.cluster == GENERATION_CLUSTER
        spec = pipeline.spec
        gpus = spec.generation if is_generation else spec.clusters[ticket.cluster]
        return f"waits for {holders(book, gpus) or 'its turn'}"


def awake_gpus(pipeline: PipelineState) -> tuple[int, ...]:
    """Of its workers that serve."""
    awake = (each for each in pipeline.workers if each.phase is WorkerPhase.AWAKE)
    return tuple(gpu for each in awake for gpu in each.gpus)


def holders(book: Book, gpus: tuple[int, ...]) -> str:
    """Who stands on them, or is promised them."""
    found: dict[str, list[int]] = {}
    for gpu in gpus:
        owner = book.standing.get(gpu) or book.state.owners.get(gpu)
        if owner:
            found.setdefault(f"{owner.pipeline_id}/{owner.cluster}", []).append(gpu)
    return "; ".join(f"{who} on {', '.join(map(str, on))}" for who, on in found.items())


def _is_another(ticket: Ticket, ask: Ask) -> bool:
    """Whether the ticket is not of this ask; one that a withdrawal overtook is of any."""
    asked = (ask.pipeline_id, ask.cluster, isinstance(ask, NotifyReleaseGpus))
    return bool(ticket.pipeline_id) and asked != (
        ticket.pipeline_id,
        ticket.cluster,
        ticket.gives_up,
    )
