"""Registry of pipelines, their runs, and nodes: requests of admission, node agents and the command
line.

    pipeline   REGISTERED -> ADMITTED <-> QUARANTINED;  any -> LEAVING -> removed
               any but LEAVING, its processes killed -> REGISTERED
    node       UP <-> DRAINING;  UP, DRAINING -> DOWN -> as before
    name       free -> a run's -> free, when the run has ended or was killed
                       a run's -> the next run's, which has made sure that the former is dead

- A request with a key is carried out once; its answer is remembered for `memory_s`.
- Registering the same spec again changes nothing; another spec is refused.
- A leaving pipeline is removed, and its request answered, when all its workers sleep and its
  trainer has released its clusters.
- One run at a time has a pipeline's name, also after a restart. If two runs take it at once, one is
  refused; a run that is late to give it back does not take it from its successor.
- A node that rejoins keeps its GPU numbers.
"""

import math
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
from rollmesh.scheduler.service.coordinators import has_live_coordinator
from rollmesh.scheduler.service.demands import DemandTracker
from rollmesh.scheduler.service.intents import Intents
from rollmesh.scheduler.service.state import (
    AnswerRecord,
    CoordinatorLink,
    NodeRecord,
    PipelineRecord,
    ReplyTarget,
    SchedulerState,
)
from rollmesh.scheduler.service.tickets import TicketQueue
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

RUN_ACTIVE = "another run has that name and is active"


class RunClaims:
    def __init__(
        self, state: SchedulerState, tickets: TicketQueue, demands: DemandTracker, intents: Intents
    ) -> None:
        self._state = state
        self._tickets = tickets
        self._demands = demands
        self._intents = intents

    def on_claim(self, ask: ClaimPipeline) -> str:
        """Return why the claim is refused, or ''; the pipeline is known."""
        state, name = self._state, ask.pipeline_id
        pipeline, run = state.fleet.pipelines[name], state.pipeline_records[name].run
        if ask.after != (run.run_id if run else ""):
            return RUN_ACTIVE if ask.run else ""  # its end was handled already
        if ask.run and pipeline.phase in (PipelinePhase.REGISTERED, PipelinePhase.LEAVING):
            return f"{name} is {pipeline.phase}, and not admitted"
        if ask.run and run is None and has_live_coordinator(state, name):
            return RUN_ACTIVE
        if run is not None:
            self.remove_run(pipeline, "its run has ended", with_engines=run.owns_engines)
            if pipeline.phase is PipelinePhase.QUARANTINED and not state.pipeline_records[name].why:
                pipeline.phase = PipelinePhase.ADMITTED
        state.pipeline_records[name].run = ask.run
        state.mark("pipelines", name)
        return ""

    def refusal(self, name: str, run_id: str) -> str:
        """Return why that run's processes must not be killed, or ''; `run_id` '' means no run."""
        run = self._state.pipeline_records[name].run
        return "" if run_id == (run.run_id if run else "") else f"another run has the name {name}"

    def remove_run(self, pipeline: PipelineState, why: str, *, with_engines: bool = True) -> None:
        """Reset a pipeline after its run's processes ended, including its engines unless others own
        them."""
        state, name = self._state, pipeline.pipeline_id
        record = state.pipeline_records[name]
        self.release_all(pipeline, why)
        if with_engines:
            self._intents.forget(name, why)
            record.why, record.num_faults, record.unsure = "", 0, []
        record.run, record.is_wired, record.resized_ranks = None, False, []
        # Late messages of the old coordinator must not be believed.
        record.started_s = math.nextafter(record.started_s, math.inf)
        state.links[name] = CoordinatorLink(last_seen_s=state.now_s)
        state.mark("pipelines", name)

    def release_all(self, pipeline: PipelineState, why: str, *, with_trainer: bool = True) -> None:
        """Cancel all requests and release its fixed clusters, except those that its trainer may be
        using."""
        name, kept = pipeline.pipeline_id, set[str]()
        if not with_trainer:
            held = [each for each in pipeline.holds if not self._intents.is_promise(name, each)]
            kept = {each for each in held if self._tickets.is_taken(name, each)}
        self._demands.close(pipeline)
        self._tickets.refuse_all(name, f"{name}: {why}", kept)
        for cluster in pipeline.spec.clusters:
            if cluster not in kept:
                self._tickets.take_back(name, cluster)
        self._state.pipeline_records[name].releasing = ""
        pipeline.releasing.clear()


RegistryRequest = (
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
"""Characters in the name of a pipeline or node, or in a label."""
MAX_LABELS = 64
"""Per node."""
MAX_NODES, MAX_PIPELINES = 10_000, 10_000
"""Names kept in the journal."""


class PipelineRegistry:
    RUN_CLAIMS: ClassVar[type[RunClaims]] = RunClaims

    def __init__(
        self, state: SchedulerState, tickets: TicketQueue, demands: DemandTracker, intents: Intents
    ) -> None:
        self._state = state
        self._tickets = tickets
        self._demands = demands
        self._intents = intents
        self._runs = self.RUN_CLAIMS(state, tickets, demands, intents)

    def on_ask(self, route: bytes, ask: RegistryRequest) -> None:
        """Carry the request out, or repeat its answer."""
        state = self._state
        if ask.key not in state.answers:
            if isinstance(ask, UnregisterPipeline):
                self._on_unregister(route, ask)
                return
            self._answer(ask.key, self._error(ask))
        answer = state.answers[ask.key]
        state.send(route, SchedulerAnswered(ask.key, answer.ok, answer.error))

    def _error(self, ask: RegistryRequest) -> str:
        """Carry it out; return why it failed, or ''."""
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
                is_known = name in self._state.pipeline_records
                return self._runs.refusal(name, ask.run_id) if is_known else self._unknown(name)
            case ClaimPipeline(pipeline_id=name):
                is_known = name in self._state.pipeline_records
                return self._runs.on_claim(ask) if is_known else self._unknown(name)
        raise AssertionError(ask)

    def _answer(self, key: str, error: str) -> None:
        state = self._state
        state.answers[key] = AnswerRecord(key=key, ok=not error, error=error, at_s=state.now_s)
        state.mark("answers", key)

    def _unknown(self, name: str) -> str:
        known = ", ".join(self._state.fleet.pipelines) or "none is"
        return f"no pipeline {name!r}; {known} registered"

    # pipelines

    def on_wired(self, route: bytes, wired: HooksWired) -> None:
        """Note that a pipeline's hooks are connected."""
        state = self._state
        newest = self._demands.newest_batch(wired.pipeline_id)
        state.send(route, SchedulerHello(state.incarnation, newest_batch=newest))
        record = state.pipeline_records.get(wired.pipeline_id)
        if record and not record.is_wired:
            record.is_wired = True
            state.mark("pipelines", wired.pipeline_id)

    def _on_register(self, ask: RegisterPipeline) -> str:
        state, spec, name = self._state, ask.spec, ask.spec.pipeline_id
        if known := state.pipeline_records.get(name):
            if known.phase is PipelinePhase.LEAVING:
                return f"{name} is leaving; register it again once it has"
            differs = [
                f for f in spec.__struct_fields__ if getattr(spec, f) != getattr(known.spec, f)
            ]
            if not differs:
                if ask.token_hash and ask.token_hash != known.token_hash:
                    known.token_hash = ask.token_hash
                    state.mark("pipelines", name)
                return ""
            fields = ", ".join(differs)
            return f"{name} is registered with another spec ({fields}); unregister it first"
        if len(state.pipeline_records) >= MAX_PIPELINES:
            return f"the limit of {MAX_PIPELINES} registered pipelines is reached"
        if not _is_valid_name(name) or GENERATION_CLUSTER in spec.clusters:
            return f"{name!r}: a name is one word, and {GENERATION_CLUSTER} is reserved"
        try:
            check(spec, state.fleet)
        except UserError as error:
            return str(error)
        state.numbers.seq += 1
        state.pipeline_records[name] = PipelineRecord(
            pipeline_id=name, seq=state.numbers.seq, spec=spec, token_hash=ask.token_hash
        )
        state.links[name] = CoordinatorLink(last_seen_s=state.now_s)
        pipeline = state.fleet.add_pipeline(spec)
        state.mark("pipelines", name)
        for worker in pipeline.workers:
            state.mark("workers", name, worker.rank)
        return ""

    def _on_admit(self, name: str) -> str:
        state = self._state
        pipeline = state.fleet.pipelines.get(name)
        if pipeline is None:
            return self._unknown(name)
        if pipeline.phase is PipelinePhase.LEAVING:
            return f"{name} is leaving"
        if pipeline.phase is PipelinePhase.REGISTERED:
            is_ill = bool(state.pipeline_records[name].why)
            pipeline.phase = PipelinePhase.QUARANTINED if is_ill else PipelinePhase.ADMITTED
            state.mark("pipelines", name)
        return ""

    def _on_kill(self, ask: KillPipeline) -> str:
        name = ask.pipeline_id
        pipeline = self._state.fleet.pipelines.get(name)
        if pipeline is None:
            return self._unknown(name)
        if ask.run_id and (why := self._runs.refusal(name, ask.run_id)):
            return why
        self._runs.remove_run(pipeline, "its processes were killed")
        if pipeline.phase is not PipelinePhase.LEAVING:
            pipeline.phase = PipelinePhase.REGISTERED
        return ""

    def _on_unregister(self, route: bytes, ask: UnregisterPipeline) -> None:
        state, name = self._state, ask.pipeline_id
        pipeline = state.fleet.pipelines.get(name)
        if pipeline is None:
            self._answer(ask.key, self._unknown(name))
            state.send(route, SchedulerAnswered(ask.key, False, self._unknown(name)))
            return
        state.reply_targets[ask.key] = ReplyTarget(route, state.now_s)
        record = state.pipeline_records[name]
        if ask.key not in record.leavers:
            record.leavers.append(ask.key)
            state.mark("pipelines", name)
        if pipeline.phase is PipelinePhase.LEAVING:
            return
        self._runs.release_all(pipeline, "it is leaving", with_trainer=False)
        self._intents.call_off(name, "it is leaving")
        pipeline.phase = PipelinePhase.LEAVING
        state.wants_plan = True

    def settle_leavers(self) -> None:
        """Remove pipelines that have left."""
        state = self._state
        for name, pipeline in list(state.fleet.pipelines.items()):
            if pipeline.phase is not PipelinePhase.LEAVING:
                continue
            is_there = any(each.phase not in RESTING_PHASES for each in pipeline.workers)
            if is_there or pipeline.holds:
                continue
            leavers = state.pipeline_records[name].leavers
            self._forget(pipeline)
            for key in leavers:
                self._answer(key, "")
                if asker := state.reply_targets.get(key):
                    state.send(asker.route, SchedulerAnswered(key, True))
                if key not in state.tickets:  # a ticket may have the same key
                    state.reply_targets.pop(key, None)

    def _forget(self, pipeline: PipelineState) -> None:
        state, name = self._state, pipeline.pipeline_id
        self._intents.forget(name, "it has left")
        state.fleet.remove_pipeline(name)
        for rank in range(len(pipeline.workers)):
            state.mark("workers", name, rank)
        del state.pipeline_records[name], state.links[name]
        state.demand_records.pop(name, None)
        state.mark("pipelines", name)
        state.mark("demands", name)
        state.wants_plan = True

    # nodes

    def _on_join(self, ask: JoinNode) -> str:
        state = self._state
        known = state.node_records.get(ask.name)
        if not _is_valid_name(ask.name) or not all(map(_is_valid_name, ask.labels)):
            return (
                f"node {ask.name[:MAX_NAME]!r}: names and labels are one word of at most "
                f"{MAX_NAME} characters, without spaces and slashes"
            )
        if len(ask.labels) > MAX_LABELS:
            return f"node {ask.name!r} has {len(ask.labels)} labels; the limit is {MAX_LABELS}"
        if known is None and len(state.node_records) >= MAX_NODES:
            return f"node {ask.name!r}: the limit of {MAX_NODES} nodes is reached"
        if not 1 <= ask.num_gpus <= MAX_NODE_GPUS:
            return f"node {ask.name!r} has {ask.num_gpus} GPUs; use 1 to {MAX_NODE_GPUS}"
        if known and len(known.node.gpus) != ask.num_gpus:
            had = len(known.node.gpus)
            return f"node {ask.name!r} had {had} GPUs and comes back with {ask.num_gpus}; rename it"
        if known:
            known.beats, known.node.labels = ask.beats, ask.labels
            node = known.node
            if known.key != ask.key and ask.beats:
                known.is_drained = False  # its agent was restarted
            node.phase = NodePhase.DRAINING if known.is_drained else NodePhase.UP
            known.key = ask.key
        else:
            first = state.numbers.next_gpu
            state.numbers.next_gpu += ask.num_gpus
            gpus = tuple(range(first, first + ask.num_gpus))
            node = GpuNode(name=ask.name, gpus=gpus, labels=ask.labels)
            state.node_records[ask.name] = NodeRecord(node=node, beats=ask.beats, key=ask.key)
        state.fleet.add_node(node)
        state.nodes_seen_s[ask.name] = state.now_s
        state.mark("nodes", ask.name)
        state.wants_plan = True
        return ""

    def on_beat(self, beat: NodeBeat) -> None:
        """Record a heartbeat; a node that was DOWN returns."""
        state = self._state
        machine = state.node_records.get(beat.name)
        if machine is None:
            return
        state.nodes_seen_s[beat.name] = state.now_s
        if machine.node.phase is NodePhase.DOWN:
            machine.node.phase = NodePhase.DRAINING if machine.is_drained else NodePhase.UP
            state.fleet.add_node(machine.node)
            state.mark("nodes", beat.name)
            state.log("node.returned", "", f"{beat.name} sends heartbeats again", is_warning=False)
            state.wants_plan = True

    def _on_drain(self, name: str, *, is_drained: bool) -> str:
        state = self._state
        machine = state.node_records.get(name)
        if machine is None:
            return f"no node {name!r}; {', '.join(state.node_records) or 'none is'} known"
        machine.is_drained = is_drained
        if machine.node.phase is not NodePhase.DOWN:
            if is_drained:
                state.fleet.drain_node(name)
            else:
                machine.node.phase = NodePhase.UP
        state.mark("nodes", name)
        state.wants_plan = True
        return ""

    def on_tick(self) -> None:
        """Mark silent nodes DOWN and forget old answers."""
        state, settings = self._state, self._state.settings
        for name, machine in state.node_records.items():
            silent_s = state.now_s - state.nodes_seen_s.get(name, state.now_s)
            is_down = machine.node.phase is NodePhase.DOWN
            if machine.beats and not is_down and silent_s >= settings.node_grace_s:
                self._lose(machine.node)
        for key in [
            k for k, a in state.answers.items() if a.at_s < state.now_s - settings.memory_s
        ]:
            del state.answers[key]
            state.mark("answers", key)

    def _lose(self, node: GpuNode) -> None:
        """Mark a node DOWN: its GPUs cannot be used, and the state of its workers is unknown."""
        state, there = self._state, frozenset(node.gpus)
        node.phase = NodePhase.DOWN
        for pipeline in state.fleet.pipelines.values():
            self._intents.leave(pipeline, there)
        state.fleet.lose_node(node.name)
        state.mark("nodes", node.name)
        state.log("node.lost", "", f"{node.name} sends no heartbeats")
        state.wants_plan = True


def _is_valid_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isprintable() and not {" ", "/"} & set(name)
