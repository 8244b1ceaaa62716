"""The admission desk: registers a pipeline where it fits, admits it, kills it, forgets it.

- It holds no state: all is in the scheduler's journal, and each question is answered from what the
  scheduler reports at that moment, so that the desk may die at any time.
- A pipeline is registered only where its GPUs exist; registered again, it keeps its place.
- Processes are ended only after the scheduler has agreed, and only those of the run that has the
  pipeline's name there; its GPUs are free only once all of them have ended.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, AddressError, ConfigError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.secret_files import hash_token, read_or_make_secret
from rollmesh.core.share import TOKENS
from rollmesh.scheduler.admission.asking import Answer, Question
from rollmesh.scheduler.admission.fleet_file import A_WORD, PipelineTable, is_word
from rollmesh.scheduler.admission.killing import end
from rollmesh.scheduler.planning.placement import Placement, PlacementRequest, check, place
from rollmesh.scheduler.planning.state import FleetState, GpuNode, NodePhase, PipelinePhase
from rollmesh.wire.frames import Buffer
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    CheckKill,
    KillPipeline,
    PipelineSpec,
    ReadScheduler,
    RegisterPipeline,
    RunClaim,
    UnregisterPipeline,
    signed,
)

OPERATOR_TOKEN = "admission.token"
Ask = Callable[[Question, float], Answer]
"""The scheduler, asked, with so many seconds of patience; AddressError if it does not answer."""
PATIENCE_S = 5.0
LEAVE_S = 1.0
"""Who leaves is answered when its engines sleep, for which nobody waits here."""
LEAVING = b'"leaving"'
"""The body of an answer about a pipeline that has not left yet."""
DEAD = b'"dead"'
"""The body of a KillPipeline that ends no process: the user knows that all have ended."""
_Body = TypeVar("_Body")


class NodeSeen(msgspec.Struct, frozen=True):
    """Of a node what placement looks at."""

    name: str
    gpus: tuple[int, ...]
    labels: tuple[str, ...]
    phase: NodePhase


class PipelineSeen(msgspec.Struct, frozen=True):
    """The same of a pipeline."""

    spec: PipelineSpec
    phase: PipelinePhase
    run: RunClaim | None = None


class FleetSeen(msgspec.Struct, frozen=True):
    """The part of what the scheduler answers to ReadScheduler that matters here."""

    nodes: tuple[NodeSeen, ...]
    pipelines: tuple[PipelineSeen, ...]

    def state(self) -> FleetState:
        """The planner's, of the places alone."""
        state = FleetState()
        for node in self.nodes:
            state.add_node(
                GpuNode(name=node.name, gpus=node.gpus, labels=node.labels, phase=node.phase)
            )
        for pipeline in self.pipelines:
            state.add_pipeline(pipeline.spec)
        return state


class Registered(msgspec.Struct, frozen=True):
    """The body of the answer to a registration."""

    spec: PipelineSpec
    """With its place."""
    token_file: str
    """The file with its token, which its runs need; readable by admission's user."""


class Secrets:
    """The tokens that admission keeps in the journal's folder, 0600 in folders 0700."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def operator_token(self) -> str:
        """The token that admission and the scheduler's service share; made if it is missing."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return read_or_make_secret(self._folder / OPERATOR_TOKEN)

    def token_file(self, pipeline_id: str) -> Path:
        """The file with the token of a pipeline, in a folder that is there."""
        folder = self._folder / TOKENS
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / pipeline_id


class Desk:
    """See the module."""

    def __init__(self, ask: Ask, secrets: Secrets) -> None:
        self._ask_unsigned = ask
        self._secrets = secrets

    def _ask(self, question: Question, patience_s: float) -> Answer:
        return self._ask_unsigned(signed(question, self._secrets.operator_token()), patience_s)

    def on(self, message: AdmissionMessage, body: Buffer, uid: int) -> Answer:
        """What came of it, for a caller of that user id; UserError for the caller's mistake."""
        match message:
            case RegisterPipeline():
                return self._register(message, body)
            case KillPipeline():
                return self._kill(message, body, uid)
            case UnregisterPipeline():
                return self._unregister(message)
            case _:
                return self._ask(message, PATIENCE_S)

    def _register(self, message: RegisterPipeline, body: Buffer) -> Answer:
        """Register the spec, or the table in the body; the answer's body is a Registered."""
        state = self._seen().state()
        spec = message.spec
        if not is_word(spec.pipeline_id):
            raise ConfigError(f"pipeline {spec.pipeline_id!r}: {A_WORD}")
        before = state.pipelines.pop(spec.pipeline_id, None)
        if body:
            table = _decoded(body, PipelineTable)
            spec = placed(spec.pipeline_id, table, state, before.spec if before else None)
        check(spec, state)
        file = self._secrets.token_file(spec.pipeline_id)
        token_hash = hash_token(read_or_make_secret(file))
        answer = self._ask(RegisterPipeline(message.key, spec, token_hash=token_hash), PATIENCE_S)
        return msgspec.structs.replace(
            answer, body=msgspec.json.encode(Registered(spec, str(file)))
        )

    def _kill(self, message: KillPipeline, body: Buffer, uid: int) -> Answer:
        """The processes of its run are ended, then its GPUs are free; how many there were."""
        name, is_dead = message.pipeline_id, bytes(body) == DEAD
        seen = self._seen(name)
        run = next((each.run for each in seen.pipelines if each.spec.pipeline_id == name), None)
        if run is None and not is_dead:
            raise ConfigError(
                f"no run has the name {name}, so there is no process that may be ended; end what "
                "uses its GPUs by hand, then say --dead"
            )
        run_id = run.run_id if run else ""
        allowed = self._ask(CheckKill(new_id("check"), name, run_id), PATIENCE_S)
        if not allowed.ok:
            return allowed
        num = end(run, name, uid) if run and not is_dead else 0
        answer = self._ask(KillPipeline(message.key, name, run_id), PATIENCE_S)
        return msgspec.structs.replace(answer, body=msgspec.json.encode(num))

    def _unregister(self, message: UnregisterPipeline) -> Answer:
        """It has left; or it is leaving, which the scheduler sees to."""
        try:
            return self._ask(message, LEAVE_S)
        except AddressError:
            name = message.pipeline_id
            phases = {each.spec.pipeline_id: each.phase for each in self._seen().pipelines}
            if phases.get(name) is PipelinePhase.LEAVING:
                return Answer(ok=True, body=LEAVING)
            raise

    def _seen(self, pipeline_id: str = "") -> FleetSeen:
        answer = self._ask(ReadScheduler(new_id("read"), pipeline_id), PATIENCE_S)
        if not answer.ok:
            raise UserError(answer.error)
        return _decoded(answer.body, FleetSeen)


def placed(
    pipeline_id: str, table: PipelineTable, others: FleetState, before: PipelineSpec | None = None
) -> PipelineSpec:
    """The table with GPUs by their numbers; one that is there already stays where it is.

    UserError in one line that names what does not fit.
    """
    if before and _is_met(table, before):
        return _spec_of(pipeline_id, table, Placement(before.clusters, before.generation))
    wish = PlacementRequest(
        pipeline_id=pipeline_id,
        clusters=table.clusters,
        generation=table.generation or table.workers,
        tp=table.tp,
        labels=table.labels,
    )
    return _spec_of(pipeline_id, table, place(wish, others))


def _is_met(table: PipelineTable, spec: PipelineSpec) -> bool:
    """Whether the places that it has are what the table asks for."""
    generation = table.generation or table.workers * table.tp
    has_all = table.clusters.keys() == spec.clusters.keys() and table.tp == spec.tp
    return has_all and all(
        len(gpus) == wanted if isinstance(wanted, int) else gpus == wanted
        for wanted, gpus in (
            (generation, spec.generation),
            *((table.clusters[name], gpus) for name, gpus in spec.clusters.items()),
        )
    )


def _spec_of(pipeline_id: str, table: PipelineTable, places: Placement) -> PipelineSpec:
    return PipelineSpec(
        pipeline_id=pipeline_id,
        clusters=places.clusters,
        generation=places.generation,
        tp=table.tp,
        weight=table.weight,
        max_gpus=table.max_gpus,
        min_gpus=table.min_gpus,
        is_preemptible=table.preemptible,
        rollouts_per_worker=table.rollouts_per_worker,
    )


def _decoded(body: Buffer, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise ConfigError(f"not what an admission desk is told: {error}") from None
