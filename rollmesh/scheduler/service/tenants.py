"""Pipelines and nodes: who comes and who goes, as admission, node agents and people say.

    pipeline   REGISTERED -> ADMITTED <-> QUARANTINED;  any -> LEAVING -> forgotten
               any but LEAVING, its processes killed -> REGISTERED
    node       UP <-> DRAINING;  UP, DRAINING -> DOWN -> as it was

Invariants: an ask with a key is done once, and its answer is known for `memory_s`; a pipeline that
is registered again with the same spec stays as it is, and another spec is refused; who leaves is
forgotten, and its ask answered, when all its workers sleep and its trainer has given up the
clusters that it has; a node that comes back has the GPU numbers that it had. Driven by
scheduler.py.
"""

from typing import ClassVar

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.placement import check
from rollmesh.scheduler.planning.state import (
    MAX_NODE_GPUS,
    RESTING_PHASES,
    GpuNode,
    NodePhase,
    PipelinePhase,
    PipelineState,
)
from rollmesh.scheduler.service.book import Asker, Book, Link
from rollmesh.scheduler.service.demands import Demands
from rollmesh.scheduler.service.intents import Intents
from rollmesh.scheduler.service.records import Answer, Machine, Tenant
from rollmesh.scheduler.service.runs import Runs
from rollmesh.scheduler.service.tickets import Tickets
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    CheckKill,
    ClaimPipeline,
    DrainNode,
    HooksWired,
    JoinNode,
    KillPipeline,
    NodeBeat,
    RegisterPipeline,
    SchedulerAnswered,
    SchedulerHello,
    UndrainNode,
    UnregisterPipeline,
)

Ask = (
    RegisterPipeline
    | AdmitPipeline
    | CheckKill
    | KillPipeline
    | UnregisterPipeline
    | JoinNode
    | DrainNode
    | UndrainNode
    | ClaimPipeline
)

MAX_NAME = 128
"""Characters of a pipeline's or a node's name, and of a label."""
MAX_LABELS = 64
"""Labels of a node."""
MAX_NODES, MAX_PIPELINES = 10_000, 10_000
"""Names that the journal keeps."""


class Tenants:
    """See the module."""

    RUNS: ClassVar[type[Runs]] = Runs

    def __init__(self, book: Book, tickets: Tickets, demands: Demands, intents: Intents) -> None:
        self._book = book
        self._tickets = tickets
        self._demands = demands
        self._intents = intents
        self._runs = self.RUNS(book, tickets, demands, intents)

    def on_ask(self, route: bytes, ask: Ask) -> None:
        """Do it, or say how it went when it was done."""
        book = self._book
        if ask.key not in book.answers:
            if isinstance(ask, UnregisterPipeline):
                self._on_unregister(route, ask)
                return
            self._answer(ask.key, self._error(ask))
        answer = book.answers[ask.key]
        book.send(route, SchedulerAnswered(ask.key, answer.ok, answer.error))

    def _error(self, ask: Ask) -> str:
        """Why it was not done, or ''."""
        match ask:
            case RegisterPipeline():
                return self._on_register(ask)
            case JoinNode():
                return self._on_join(ask)
            case DrainNode(name=name):
                return self._on_drain(name, is_drained=True)
            case UndrainNode(name=name):
                return self._on_drain(name, is_drained=False)
            case AdmitPipeline(pipeline_id=name):
                return self._on_admit(name)
            case KillPipeline():
                return self._on_kill(ask)
            case CheckKill(pipeline_id=name):
                is_known = name in self._book.tenants
                return self._runs.refusal(name, ask.run_id) if is_known else self._unknown(name)
            case ClaimPipeline(pipeline_id=name):
                is_known = name in self._book.tenants
                return self._runs.on_claim(ask) if is_known else self._unknown(name)
        raise AssertionError(ask)

    def _answer(self, key: str, error: str) -> None:
        book = self._book
        book.answers[key] = Answer(key=key, ok=not error, error=error, at_s=book.now_s)
        book.mark("answers", key)

    def _unknown(self, name: str) -> str:
        known = ", ".join(self._book.state.pipelines) or "none is"
        return f"no pipeline {name!r}; {known} registered"

    # pipelines

    def on_wired(self, route: bytes, wired: HooksWired) -> None:
        """Its rollouts will report."""
        book = self._book
        newest = self._demands.newest_batch(wired.pipeline_id)
        book.send(route, SchedulerHello(book.incarnation, newest_batch=newest))
        tenant = book.tenants.get(wired.pipeline_id)
        if tenant and not tenant.is_wired:
            tenant.is_wired = True
            book.mark("pipelines", wired.pipeline_id)

    def _on_register(self, ask: RegisterPipeline) -> str:
        book, spec, name = self._book, ask.spec, ask.spec.pipeline_id
        if known := book.tenants.get(name):
            if known.phase is PipelinePhase.LEAVING:
                return f"{name} is leaving; register it again once it has"
            differs = [
                f for f in spec.__struct_fields__ if getattr(spec, f) != getattr(known.spec, f)
            ]
            if not differs:
                if ask.token_hash and ask.token_hash != known.token_hash:
                    known.token_hash = ask.token_hash
                    book.mark("pipelines", name)
                return ""
            fields = ", ".join(differs)
            return f"{name} is registered with another spec ({fields}); unregister it first"
        if len(book.tenants) >= MAX_PIPELINES:
            return f"{MAX_PIPELINES} pipelines are registered, and no more can be"
        if not _is_word(name) or GENERATION_CLUSTER in spec.clusters:
            return f"{name!r}: a name is one word, and {GENERATION_CLUSTER} is `generation`"
        try:
            check(spec, book.state)
        except UserError as error:
            return str(error)
        book.numbers.seq += 1
        book.tenants[name] = Tenant(
            pipeline_id=name, seq=book.numbers.seq, spec=spec, token_hash=ask.token_hash
        )
        book.links[name] = Link(heard_s=book.now_s)
        pipeline = book.state.add_pipeline(spec)
        book.mark("pipelines", name)
        for worker in pipeline.workers:
            book.mark("workers", name, worker.rank)
        return ""

    def _on_admit(self, name: str) -> str:
        book = self._book
        pipeline = book.state.pipelines.get(name)
        if pipeline is None:
            return self._unknown(name)
        if pipeline.phase is PipelinePhase.LEAVING:
            return f"{name} is leaving"
        if pipeline.phase is PipelinePhase.REGISTERED:
            is_ill = bool(book.tenants[name].why)
            pipeline.phase = PipelinePhase.QUARANTINED if is_ill else PipelinePhase.ADMITTED
            book.mark("pipelines", name)
        return ""

    def _on_kill(self, ask: KillPipeline) -> str:
        name = ask.pipeline_id
        pipeline = self._book.state.pipelines.get(name)
        if pipeline is None:
            return self._unknown(name)
        if ask.run_id and (why := self._runs.refusal(name, ask.run_id)):
            return why
        self._runs.bury(pipeline, "its processes were killed")
        if pipeline.phase is not PipelinePhase.LEAVING:
            pipeline.phase = PipelinePhase.REGISTERED
        return ""

    def _on_unregister(self, route: bytes, ask: UnregisterPipeline) -> None:
        book, name = self._book, ask.pipeline_id
        pipeline = book.state.pipelines.get(name)
        if pipeline is None:
            self._answer(ask.key, self._unknown(name))
            book.send(route, SchedulerAnswered(ask.key, False, self._unknown(name)))
            return
        book.askers[ask.key] = Asker(route, book.now_s)
        tenant = book.tenants[name]
        if ask.key not in tenant.leavers:
            tenant.leavers.append(ask.key)
            book.mark("pipelines", name)
        if pipeline.phase is PipelinePhase.LEAVING:
            return
        self._runs.strip(pipeline, "it is leaving", with_trainer=False)
        self._intents.call_off(name, "it is leaving")
        pipeline.phase = PipelinePhase.LEAVING
        book.wants_plan = True

    def settle_leavers(self) -> None:
        """Forget who has left."""
        book = self._book
        for name, pipeline in list(book.state.pipelines.items()):
            if pipeline.phase is not PipelinePhase.LEAVING:
                continue
            is_there = any(each.phase not in RESTING_PHASES for each in pipeline.workers)
            if is_there or pipeline.holds:
                continue
            leavers = book.tenants[name].leavers
            self._forget(pipeline)
            for key in leavers:
                self._answer(key, "")
                if asker := book.askers.get(key):
                    book.send(asker.route, SchedulerAnswered(key, True))
                if key not in book.tickets:  # somebody may call two asks the same
                    book.askers.pop(key, None)

    def _forget(self, pipeline: PipelineState) -> None:
        book, name = self._book, pipeline.pipeline_id
        self._intents.forget(name, "it has left")
        book.state.remove_pipeline(name)
        for rank in range(len(pipeline.workers)):
            book.mark("workers", name, rank)
        del book.tenants[name], book.links[name]
        book.wishes.pop(name, None)
        book.mark("pipelines", name)
        book.mark("demands", name)
        book.wants_plan = True

    # nodes

    def _on_join(self, ask: JoinNode) -> str:
        book = self._book
        known = book.machines.get(ask.name)
        if not _is_word(ask.name) or not all(map(_is_word, ask.labels)):
            return (
                f"node {ask.name[:MAX_NAME]!r}: a name is one word, as a label is, of at most "
                f"{MAX_NAME} characters, without spaces and slashes"
            )
        if len(ask.labels) > MAX_LABELS:
            return f"node {ask.name!r} has {len(ask.labels)} labels; it has {MAX_LABELS} at most"
        if known is None and len(book.machines) >= MAX_NODES:
            return f"node {ask.name!r}: {MAX_NODES} nodes have joined, and no more can"
        if not 1 <= ask.num_gpus <= MAX_NODE_GPUS:
            return f"node {ask.name!r} has {ask.num_gpus} GPUs; it has from 1 to {MAX_NODE_GPUS}"
        if known and len(known.node.gpus) != ask.num_gpus:
            had = len(known.node.gpus)
            return f"node {ask.name!r} had {had} GPUs and comes back with {ask.num_gpus}; rename it"
        if known:
            known.beats, known.node.labels = ask.beats, ask.labels
            node = known.node
            if known.key != ask.key and ask.beats:
                known.is_drained = False  # its agent was started anew
            node.phase = NodePhase.DRAINING if known.is_drained else NodePhase.UP
            known.key = ask.key
        else:
            first = book.numbers.next_gpu
            book.numbers.next_gpu += ask.num_gpus
            gpus = tuple(range(first, first + ask.num_gpus))
            node = GpuNode(name=ask.name, gpus=gpus, labels=ask.labels)
            book.machines[ask.name] = Machine(node=node, beats=ask.beats, key=ask.key)
        book.state.add_node(node)
        book.beats_s[ask.name] = book.now_s
        book.mark("nodes", ask.name)
        book.wants_plan = True
        return ""

    def on_beat(self, beat: NodeBeat) -> None:
        """It lives; one that was given up does again."""
        book = self._book
        machine = book.machines.get(beat.name)
        if machine is None:
            return
        book.beats_s[beat.name] = book.now_s
        if machine.node.phase is NodePhase.DOWN:
            machine.node.phase = NodePhase.DRAINING if machine.is_drained else NodePhase.UP
            book.state.add_node(machine.node)
            book.mark("nodes", beat.name)
            book.note("node.returned", "", f"{beat.name} beats again", is_warning=False)
            book.wants_plan = True

    def _on_drain(self, name: str, *, is_drained: bool) -> str:
        book = self._book
        machine = book.machines.get(name)
        if machine is None:
            return f"no node {name!r}; {', '.join(book.machines) or 'none is'} known"
        machine.is_drained = is_drained
        if machine.node.phase is not NodePhase.DOWN:
            if is_drained:
                book.state.drain_node(name)
            else:
                machine.node.phase = NodePhase.UP
        book.mark("nodes", name)
        book.wants_plan = True
        return ""

    def on_tick(self) -> None:
        """Nodes that are silent; answers that nobody asks for any more."""
        book, settings = self._book, self._book.settings
        for name, machine in book.machines.items():
            silent_s = book.now_s - book.beats_s.get(name, book.now_s)
            is_down = machine.node.phase is NodePhase.DOWN
            if machine.beats and not is_down and silent_s >= settings.node_grace_s:
                self._lose(machine.node)
        for key in [k for k, a in book.answers.items() if a.at_s < book.now_s - settings.memory_s]:
            del book.answers[key]
            book.mark("answers", key)

    def _lose(self, node: GpuNode) -> None:
        """What is on it nobody can use, nor knows anything of."""
        book, there = self._book, frozenset(node.gpus)
        node.phase = NodePhase.DOWN
        for pipeline in book.state.pipelines.values():
            self._intents.leave(pipeline, there)
        book.state.lose_node(node.name)
        book.mark("nodes", node.name)
        book.note("node.lost", "", f"{node.name} does not beat")
        book.wants_plan = True


def _is_word(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isprintable() and not {" ", "/"} & set(name)
