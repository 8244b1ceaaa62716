"""What the planner sees of the simulated fleet, and when it is asked."""

from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.fleet import PROGRESS_BUCKETS, Fleet
from rollmesh.scheduler.simulator.resizes import TURN_S
from rollmesh.scheduler.simulator.trace import Costs, Trace, TracePipeline
from rollmesh.scheduler.simulator.world import run

ROLLS = TracePipeline(
    pipeline_id="a",
    clusters={"actor_train": (0,)},
    generation=(0,),
    rollouts_per_worker=4,
    rollouts_s=(tuple(float(each) for each in range(1, 201)),),
)


class Sees:
    """Wakes all, and takes down what it was shown."""

    name = "sees"
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
    costs = Costs(sleep_s=5.0, wake_s=15.0, kv_tokens_per_s=10.0)
    return Trace(name="x", nodes=(1,), pipelines=pipelines, costs=costs)


def _ask(fleet: Fleet) -> None:
    fleet.open_demand("a", 1)


def test_time_alone_is_reason_to_plan_where_the_policy_says_so() -> None:
    sees = Sees(again_s=(7.0, 9.5))
    run(_trace(ROLLS), sees)
    assert sees.asked_s[:3] == [0.0, 7.0, 9.5]


def test_an_older_wish_to_plan_again_is_forgotten() -> None:
    sees = Sees(again_s=(7.0, float("inf")))
    agenda = Agenda()
    fleet = Fleet(_trace(ROLLS), sees, agenda)

    class Nobody:
        def woke(self, rank: int) -> None:
            """It has no rollouts."""

        def sleeps(self, rank: int) -> int:
            return 0

        def granted(self) -> None:
            """It asks for nothing."""

        def kv_tokens(self, rank: int) -> int:
            return 0

    agenda.at(0.0, lambda: fleet.join(ROLLS.spec(), Nobody()))
    agenda.at(0.0, lambda: _ask(fleet))
    agenda.at(3.0, lambda: _ask(fleet))
    agenda.run(9.0)
    assert sees.asked_s == [0.0, 3.0]


def test_progress_is_reason_to_plan_some_fifty_times_a_step() -> None:
    sees = Sees()
    run(_trace(ROLLS), sees)
    seen = [each for each in sees.remaining if each]
    assert PROGRESS_BUCKETS <= len(seen) <= PROGRESS_BUCKETS + 3
    assert seen == sorted(seen, reverse=True)
    assert sees.remaining[-1] == 0


def test_the_planner_sees_what_a_sleep_would_lose_and_its_own_credits() -> None:
    sees = Sees()
    run(_trace(ROLLS), sees)
    # four rollouts of 1 to 4 s began at 15 s; at 19 s those of 5, 6 and 7 s have run 3, 2 and 1 s
    assert sees.kv_tokens[sees.asked_s.index(19.0)] == 60
    before_s = sees.asked_s[3]
    assert sees.credits[4] == (before_s + 1.0, before_s)


def test_who_has_left_is_forgotten_once_its_engines_are_asleep() -> None:
    sees = Sees()
    short = TracePipeline(
        pipeline_id="b", clusters={}, generation=(0,), rollouts_s=((1.0,),), arrival_s=9000.0
    )
    run(_trace(ROLLS, short), sees)
    assert sees.num_pipelines == 1


def test_who_has_a_resize_under_way_is_shown_as_busy_for_its_turn() -> None:
    sees = Sees(again_s=(7.0, 9.5))
    run(_trace(ROLLS), sees)
    assert sees.asked_s[:5] == [0.0, 7.0, 9.5, TURN_S, 15.0]
    assert sees.busy[:5] == [False, True, True, False, False]
