"""A fake scheduler with one pipeline, which answers with the real service's views."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rollmesh.scheduler.planning.state import FleetState, PipelinePhase
from rollmesh.scheduler.service.explain import ExplainContext, explain_fleet
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    ClaimPipeline,
    PipelineSpec,
    ReadScheduler,
    RunClaim,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Hub, wait

SPEC = PipelineSpec(
    pipeline_id="math", clusters={"actor_train": (0, 1)}, generation=(0, 1, 2, 3), tp=2
)


@contextmanager
def fleet(
    phase: PipelinePhase = PipelinePhase.ADMITTED,
    received: list[AnyMessage] | None = None,
    error: str = "",
    num_driven: int = 0,
    run: RunClaim | None = None,
    num_registered: int = 0,
    bind: str = "tcp://127.0.0.1:0",
) -> Iterator[str]:
    """Yield the scheduler's address.

    It answers claims with `error` and appends each message to `received`. `run` holds the
    pipeline's name. The first `num_driven` reads show a coordinator of the pipeline, and the first
    `num_registered` reads show it registered and not admitted.
    """
    state = FleetState()
    received = [] if received is None else received
    state.add_pipeline(SPEC).phase = phase
    runs = {"math": run} if run else {}
    hub, is_over = Hub(bind), threading.Event()
    looks = iter([frozenset({"math"})] * num_driven)

    def serve() -> None:
        while not is_over.is_set():
            wait([hub], None, 0.05)
            for route, packet in hub.receive():
                received.append(packet.message)
                match packet.message:
                    case ReadScheduler(key, pipeline_id):
                        num_looks = sum(isinstance(each, ReadScheduler) for each in received)
                        is_early = num_looks <= num_registered
                        early = PipelinePhase.REGISTERED if is_early else phase
                        state.pipelines["math"].phase = early
                        context = ExplainContext(
                            live_coordinators=next(looks, frozenset()), runs=runs
                        )
                        explanation = explain_fleet(state, context, pipeline_id)
                        answer = SchedulerAnswered(key, not explanation.error, explanation.error)
                        hub.send(route, Packet(answer, body=msgspec.json.encode(explanation)))
                    case ClaimPipeline(key):
                        hub.send(route, Packet(SchedulerAnswered(key, not error, error)))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield hub.address
    finally:
        is_over.set()
        thread.join()
        hub.close()
