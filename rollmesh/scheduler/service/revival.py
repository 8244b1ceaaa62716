"""From rows to a machine: what a life of the scheduler finds of the one before.

Owns nothing. Invariants: whose a GPU is and who stands there follow from the rows alone; a worker
that was told to wake stands on its GPUs, one that was only promised to wake does not; what no row
says (routes, beats, who is heard) counts from the first step on. Driven by scheduler.py.
"""

from collections.abc import Iterator

from rollmesh.scheduler.planning.state import (
    FIXED,
    OWNING_PHASES,
    RESTING_PHASES,
    ClusterRequest,
    Owner,
    PipelineState,
)
from rollmesh.scheduler.service.book import Asker, Book, Link
from rollmesh.scheduler.service.records import (
    Answer,
    Credits,
    Engine,
    Held,
    Intent,
    IntentKind,
    IntentPhase,
    Machine,
    Numbers,
    Revived,
    Stream,
    Tenant,
    Ticket,
    Wish,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER


def revive(book: Book, revived: Revived) -> Book:
    """Fill an empty book."""
    for numbers in revived.read("numbers", Numbers):
        for field in numbers.__struct_fields__:
            setattr(book.numbers, field, getattr(numbers, field))
    book.numbers.num_lives += 1
    book.now_s = book.state.now_s = book.numbers.now_s
    for credits in revived.read("credits", Credits):
        book.credits.credited_s, book.credits.gpu_s = credits.credited_s, credits.gpu_s
    book.state.credited_s = book.credits.credited_s
    book.mark("numbers", "1")
    _nodes(book, revived)
    _pipelines(book, revived)
    _asks(book, revived)
    _owners(book)
    book.wants_plan = True
    return book


def _nodes(book: Book, revived: Revived) -> None:
    for machine in sorted(revived.read("nodes", Machine), key=lambda each: each.node.gpus):
        book.machines[machine.node.name] = machine
        book.state.add_node(machine.node)


def _pipelines(book: Book, revived: Revived) -> None:
    for tenant in sorted(revived.read("pipelines", Tenant), key=lambda each: each.seq):
        name = tenant.pipeline_id
        pipeline = book.state.add_pipeline(tenant.spec)
        pipeline.phase, pipeline.waiting_s = tenant.phase, tenant.waiting_s
        pipeline.credit_gpu_s = book.credits.gpu_s.get(name, 0.0)
        if tenant.releasing:
            pipeline.releasing[GENERATION_CLUSTER] = tenant.releasing
        book.tenants[name] = tenant
        book.links[name] = Link(heard_s=0.0)
    for engine in revived.read("workers", Engine):
        worker = book.state.pipelines[engine.pipeline_id].workers[engine.rank]
        worker.phase, worker.epoch, worker.since_s = engine.phase, engine.epoch, engine.since_s
    for pipeline in book.state.pipelines.values():
        book.state.recount_workers(pipeline)
    for held in sorted(revived.read("holds", Held), key=lambda each: each.hold.since_s):
        book.state.pipelines[held.pipeline_id].holds[held.hold.cluster] = held.hold
    for wish in revived.read("demands", Wish):
        book.wishes[wish.pipeline_id] = wish
        pipeline = book.state.pipelines[wish.pipeline_id]
        pipeline.demand, pipeline.demand_history = wish.demand, wish.demand_history
    for stream in revived.read("progress", Stream):
        book.state.pipelines[stream.pipeline_id].progress[stream.stream] = stream.progress


def _asks(book: Book, revived: Revived) -> None:
    requests = sorted(revived.read("requests", ClusterRequest), key=lambda each: each.seq)
    book.state.requests.update((each.key, each) for each in requests)
    for ticket in sorted(revived.read("tickets", Ticket), key=lambda each: each.asked_s):
        book.tickets[ticket.key] = ticket
        book.askers[ticket.key] = Asker(b"", 0.0)
        if ticket.is_open:
            line = book.queue.setdefault((ticket.pipeline_id, ticket.cluster), {})
            line[ticket.key] = None
    for intent in sorted(revived.read("intents", Intent), key=lambda each: each.intent_id):
        book.intents[intent.intent_id] = intent
    ended = sorted(revived.read("ended", Intent), key=lambda each: (each.ended_s, each.intent_id))
    book.ended.update((each.intent_id, each) for each in ended)
    book.answers.update((each.key, each) for each in revived.read("answers", Answer))


def _owners(book: Book) -> None:
    """Whose each GPU is, and who stands there."""
    promised = {
        (each.pipeline_id, each.cluster, each.rank)
        for each in book.intents.values()
        if each.kind is not IntentKind.SLEEP and each.phase is IntentPhase.PLANNED
    }
    for name, pipeline in book.state.pipelines.items():
        for owner, gpus, owns, stands in _claims(name, pipeline):
            if owns:
                book.state.owners.update(dict.fromkeys(gpus, owner))
            if stands and owner not in promised:
                book.standing.update(dict.fromkeys(gpus, owner))


def _claims(
    name: str, pipeline: PipelineState
) -> Iterator[tuple[Owner, tuple[int, ...], bool, bool]]:
    """Each that has GPUs: whether it owns them, and stands there unless they are but promised."""
    for cluster in pipeline.holds:
        yield Owner(name, cluster, FIXED), pipeline.spec.clusters[cluster], True, True
    for worker in pipeline.workers:
        owner = Owner(name, GENERATION_CLUSTER, worker.rank)
        owns = worker.phase in OWNING_PHASES
        yield owner, worker.gpus, owns, worker.phase not in RESTING_PHASES
