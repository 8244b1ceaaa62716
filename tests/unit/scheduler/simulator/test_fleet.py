"""The simulated fleet: event order, resizes one after another, and execution of plans."""

from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.planning.state import GenerationWorker
from rollmesh.scheduler.simulator.charts import GpuUse, SpanRecorder
from rollmesh.scheduler.simulator.fleet import (
    PROGRESS_BUCKETS,
    TURN_S,
    EventQueue,
    ResizeQueue,
    SimulatedFleet,
)
from rollmesh.scheduler.simulator.run import simulate_trace
from rollmesh.scheduler.simulator.trace import SwitchCosts, Trace, TracePipeline
from rollmesh.wire.scheduling import WorkerPhase


def test_events_run_in_order_of_time_and_last_ones_at_the_end_of_their_moment() -> None:
    events, seen = EventQueue(), list[str]()
    events.at(2.0, lambda: seen.append("plan"), last=True)
    events.at(2.0, lambda: events.at(2.0, lambda: seen.append("later")))
    events.at(2.0, lambda: seen.append("b"))
    events.after(1.0, lambda: seen.append("a"))
    events.run(5.0)
    assert seen == ["a", "b", "later", "plan"]
    assert events.now_s == 2.0


def test_events_after_the_end_do_not_run() -> None:
    events, seen = EventQueue(), list[str]()
    events.at(3.0, lambda: seen.append("a"))
    events.run(2.9)
    assert seen == []
    events.run(3.0)
    assert seen == ["a"]


WAKING, SLEEPING = WorkerPhase.WAKING, WorkerPhase.SLEEPING


class ResizeHarness:
    """A fleet with one GPU per worker; events are recorded with their times."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.spans = SpanRecorder()
        self.result: list[tuple[float, str, str]] = []
        costs = SwitchCosts(sleep_s=5.0, wake_s=15.0)
        self.resizes = ResizeQueue(
            costs, self.events, self.spans, self._sleeps, self._done, self._turned
        )

    def promise(self, pipeline_id: str, gpu: int, phase: WorkerPhase) -> GenerationWorker:
        worker = GenerationWorker(rank=gpu, gpus=(gpu,), phase=phase)
        if phase is SLEEPING:
            self.spans.enter(worker.gpus, pipeline_id, f"engine {gpu}", GpuUse.SERVE, 0.0)
        self.resizes.promise(pipeline_id, worker)
        return worker

    def run(self, until_s: float) -> None:
        self.resizes.drive()
        self.events.run(until_s)

    def _sleeps(self, pipeline_id: str, worker: GenerationWorker) -> None:
        self.result.append((self.events.now_s, "sleeps", f"{pipeline_id}{worker.rank}"))

    def _done(self, pipeline_id: str, worker: GenerationWorker) -> None:
        self.result.append((self.events.now_s, "done", f"{pipeline_id}{worker.rank}"))
        if worker.phase is SLEEPING:
            self.spans.leave(worker.gpus, self.events.now_s)
        self._turned()

    def _turned(self) -> None:
        self.events.at(self.events.now_s, self.resizes.drive, last=True)


def test_sleeps_run_together_and_wakes_after_them() -> None:
    harness = ResizeHarness()
    harness.promise("a", 0, WAKING)
    for gpu in (1, 2):
        harness.promise("a", gpu, SLEEPING)
    harness.run(60.0)
    assert harness.result == [
        (0.0, "sleeps", "a1"),
        (0.0, "sleeps", "a2"),
        (5.0, "done", "a1"),
        (5.0, "done", "a2"),
        (20.0, "done", "a0"),
    ]


def test_a_worker_that_is_to_sleep_serves_until_its_resize_begins() -> None:
    harness = ResizeHarness()
    harness.promise("a", 0, WAKING)
    harness.run(1.0)
    assert harness.resizes.busy == {"a"}
    harness.promise("a", 1, SLEEPING)
    harness.run(60.0)
    assert harness.result == [(TURN_S, "sleeps", "a1"), (15.0, "done", "a0"), (15.0, "done", "a1")]
    assert harness.resizes.busy == set()


def test_a_worker_wakes_on_free_gpus_and_pipelines_do_not_wait_for_each_other() -> None:
    harness = ResizeHarness()
    harness.promise("a", 0, SLEEPING)
    harness.promise("b", 0, WAKING)
    harness.promise("b", 1, WAKING)
    harness.run(60.0)
    # b0 waits for a's sleep, and then for the turn of b1, which began earlier
    assert harness.result == [
        (0.0, "sleeps", "a0"),
        (5.0, "done", "a0"),
        (15.0, "done", "b1"),
        (25.0, "done", "b0"),
    ]


ROLLS = TracePipeline(
    pipeline_id="a",
    clusters={"actor_train": (0,)},
    generation=(0,),
    rollouts_per_worker=4,
    rollouts_s=(tuple(float(each) for each in range(1, 201)),),
)


class RecordingPolicy:
    """Wakes the first worker of each pipeline, and records the states that it plans for."""

    name = "recording"
    reserve_after_s = 60.0

    def __init__(self, again_s: tuple[float, ...] = ()) -> None:
        self.asked_s: list[float] = []
        self.remaining: list[int | None] = []
        self.kv_tokens: list[int] = []
        self.credits: list[tuple[float, float]] = []
        self.busy: list[bool] = []
        self.num_pipelines = 0
        self._again_s = list(again_s)

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        state = builder.state
        self.asked_s.append(state.now_s)
        self.num_pipelines = len(state.pipelines)
        for pipeline_id, pipeline in state.pipelines.items():
            worker = pipeline.workers[0]
            self.remaining.append(pipeline.remaining)
            self.kv_tokens.append(worker.kv_tokens)
            self.busy.append(pipeline.is_resizing)
            self.credits.append((pipeline.credit_gpu_s, state.credited_s))
            if pipeline.demand and builder.can_expand(pipeline_id, worker):
                builder.expand(pipeline_id, worker)
        credits = dict.fromkeys(state.pipelines, state.now_s + 1.0)
        return PolicyResult(credits, self._again_s.pop(0) if self._again_s else float("inf"))


def _trace(*pipelines: TracePipeline) -> Trace:
    costs = SwitchCosts(sleep_s=5.0, wake_s=15.0, kv_tokens_per_s=10.0)
    return Trace(name="x", nodes=(1,), pipelines=pipelines, costs=costs)


def _ask(fleet: SimulatedFleet) -> None:
    fleet.open_demand("a", 1)


def test_a_plan_is_made_at_the_time_that_the_policy_names() -> None:
    policy = RecordingPolicy(again_s=(7.0, 9.5))
    simulate_trace(_trace(ROLLS), policy)
    assert policy.asked_s[:3] == [0.0, 7.0, 9.5]


def test_a_newer_time_to_plan_replaces_an_older() -> None:
    policy = RecordingPolicy(again_s=(7.0, float("inf")))
    events = EventQueue()
    fleet = SimulatedFleet(_trace(ROLLS), policy, events)

    class IdlePipeline:
        """A pipeline without rollouts or requests."""

        def woke(self, rank: int) -> None:
            pass

        def sleeps(self, rank: int) -> int:
            return 0

        def granted(self) -> None:
            pass

        def kv_tokens(self, rank: int) -> int:
            return 0

    events.at(0.0, lambda: fleet.join(ROLLS.spec(), IdlePipeline()))
    events.at(0.0, lambda: _ask(fleet))
    events.at(3.0, lambda: _ask(fleet))
    events.run(9.0)
    assert policy.asked_s == [0.0, 3.0]


def test_progress_triggers_about_fifty_plans_per_step() -> None:
    policy = RecordingPolicy()
    simulate_trace(_trace(ROLLS), policy)
    seen = [each for each in policy.remaining if each]
    assert PROGRESS_BUCKETS <= len(seen) <= PROGRESS_BUCKETS + 3
    assert seen == sorted(seen, reverse=True)
    assert policy.remaining[-1] == 0


def test_the_planner_receives_kv_tokens_and_its_own_credits() -> None:
    policy = RecordingPolicy()
    simulate_trace(_trace(ROLLS), policy)
    # four rollouts of 1 to 4 s began at 15 s; at 19 s those of 5, 6 and 7 s have run 3, 2 and 1 s
    assert policy.kv_tokens[policy.asked_s.index(19.0)] == 60
    before_s = policy.asked_s[3]
    assert policy.credits[4] == (before_s + 1.0, before_s)


def test_a_pipeline_that_has_left_is_forgotten_once_its_engines_are_asleep() -> None:
    policy = RecordingPolicy()
    short = TracePipeline(
        pipeline_id="b", clusters={}, generation=(0,), rollouts_s=((1.0,),), arrival_s=9000.0
    )
    simulate_trace(_trace(ROLLS, short), policy)
    assert policy.num_pipelines == 1


def test_an_engine_with_a_resize_in_progress_is_busy_for_its_turn() -> None:
    policy = RecordingPolicy(again_s=(7.0, 9.5))
    simulate_trace(_trace(ROLLS), policy)
    assert policy.asked_s[:5] == [0.0, 7.0, 9.5, TURN_S, 15.0]
    assert policy.busy[:5] == [False, True, True, False, False]
