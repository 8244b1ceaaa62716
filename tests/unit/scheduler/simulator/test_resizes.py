"""One resize of a pipeline after another, as in the service."""

from rollmesh.scheduler.planning.state import GenerationWorker
from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.resizes import TURN_S, Resizes
from rollmesh.scheduler.simulator.spans import Spans, Use
from rollmesh.scheduler.simulator.trace import Costs
from rollmesh.wire.scheduling import WorkerPhase

WAKING, SLEEPING = WorkerPhase.WAKING, WorkerPhase.SLEEPING


class Stage:
    """Of workers on one GPU each; what happens is told with its time."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.spans = Spans()
        self.told: list[tuple[float, str, str]] = []
        costs = Costs(sleep_s=5.0, wake_s=15.0)
        self.resizes = Resizes(
            costs, self.agenda, self.spans, self._sleeps, self._done, self._turned
        )

    def promise(self, pipeline_id: str, gpu: int, phase: WorkerPhase) -> GenerationWorker:
        worker = GenerationWorker(rank=gpu, gpus=(gpu,), phase=phase)
        if phase is SLEEPING:
            self.spans.enter(worker.gpus, pipeline_id, f"engine {gpu}", Use.SERVE, 0.0)
        self.resizes.promise(pipeline_id, worker)
        return worker

    def run(self, until_s: float) -> None:
        self.resizes.drive()
        self.agenda.run(until_s)

    def _sleeps(self, pipeline_id: str, worker: GenerationWorker) -> None:
        self.told.append((self.agenda.now_s, "sleeps", f"{pipeline_id}{worker.rank}"))

    def _done(self, pipeline_id: str, worker: GenerationWorker) -> None:
        self.told.append((self.agenda.now_s, "done", f"{pipeline_id}{worker.rank}"))
        if worker.phase is SLEEPING:
            self.spans.leave(worker.gpus, self.agenda.now_s)
        self._turned()

    def _turned(self) -> None:
        self.agenda.at(self.agenda.now_s, self.resizes.drive, last=True)


def test_all_that_sleep_do_so_at_once_and_what_wakes_comes_after() -> None:
    stage = Stage()
    stage.promise("a", 0, WAKING)
    for gpu in (1, 2):
        stage.promise("a", gpu, SLEEPING)
    stage.run(60.0)
    assert stage.told == [
        (0.0, "sleeps", "a1"),
        (0.0, "sleeps", "a2"),
        (5.0, "done", "a1"),
        (5.0, "done", "a2"),
        (20.0, "done", "a0"),
    ]


def test_what_is_to_sleep_serves_until_the_resize_before_has_had_its_turn() -> None:
    stage = Stage()
    stage.promise("a", 0, WAKING)
    stage.run(1.0)
    assert stage.resizes.busy == {"a"}
    stage.promise("a", 1, SLEEPING)
    stage.run(60.0)
    assert stage.told == [(TURN_S, "sleeps", "a1"), (15.0, "done", "a0"), (15.0, "done", "a1")]
    assert stage.resizes.busy == set()


def test_a_worker_wakes_where_nobody_stands_and_pipelines_do_not_wait_for_each_other() -> None:
    stage = Stage()
    stage.promise("a", 0, SLEEPING)
    stage.promise("b", 0, WAKING)
    stage.promise("b", 1, WAKING)
    stage.run(60.0)
    # b0 waits for a's sleep, and then for the turn of b1, which could begin before
    assert stage.told == [
        (0.0, "sleeps", "a0"),
        (5.0, "done", "a0"),
        (15.0, "done", "b1"),
        (25.0, "done", "b0"),
    ]
