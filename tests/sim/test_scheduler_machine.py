"""The scheduler's machine under any history: requests, releases, progress, failures, restarts.

Hypothesis writes the histories. After each step:
- Each GPU has one user.
- Owners are those that holds and workers name.
- No worker is evicted without need.

At the end every waiting request is granted within the bound, and nothing is left.
"""

import math

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollmesh.scheduler.planning import policies
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.state import SchedulerSettings
from rollmesh.testing.scheduler_sim.manual import ManualScheduler, PipelineActors
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    PipelineSpec,
    ReportProgress,
    RequestGpus,
    UnregisterPipeline,
)

NUM_GPUS = 4
SETTINGS = SchedulerSettings(
    resize_deadline_s=6.0, slack_s=1.0, patience_s=20.0, settle_s=1.0, turn_s=2.0
)
SPECS = (
    PipelineSpec(pipeline_id="a", clusters={"actor_train": (0, 1)}, generation=(0, 1, 2, 3)),
    PipelineSpec(
        pipeline_id="b",
        clusters={"actor_train": (2, 3), "critic": (1, 2)},
        generation=(0, 1, 2, 3),
        tp=2,
    ),
    PipelineSpec(
        pipeline_id="c",
        clusters={"actor_train": (0, 1, 2, 3)},
        generation=(3,),
        weight=2.0,
    ),
)
PRIORITIES = {"actor_train": GpuPriority.ACTOR_TRAINING, "critic": GpuPriority.CRITIC_TRAINING}
MAX_COMPLETED = 50
"""A number of rollouts above the requested one."""
CYCLES_A_REQUEST = 4
"""Upper bound of a release, a wake in progress, a sleep, and the grant."""

names = st.sampled_from([spec.pipeline_id for spec in SPECS])


class SchedulerHistories(RuleBasedStateMachine):
    """Random histories of the scheduler's machine."""

    policy = "fair"

    @initialize()
    def begin(self) -> None:
        self.manual = ManualScheduler(SPECS, NUM_GPUS, policies.make_policy(self.policy), SETTINGS)
        self.batch = self.step = 0

    # programs

    @rule(name=names, num=st.sampled_from([0, 4, 40]))
    def asks_for_engines(self, name: str, num: int) -> None:
        self._request(name, GENERATION_CLUSTER, num)

    @rule(name=names, pick=st.integers(0, 1))
    def asks_for_a_cluster(self, name: str, pick: int) -> None:
        cluster = self._cluster(name, pick)
        waits = {each.cluster for each in self._cast(name).open.values()}
        if cluster not in self._cast(name).held and cluster not in waits:
            self._request(name, cluster, 0)

    @rule(name=names, pick=st.integers(0, 2))
    def gives_up(self, name: str, pick: int) -> None:
        each = self._cast(name)
        clusters = [*each.held, GENERATION_CLUSTER]
        cluster = clusters[pick % len(clusters)]
        self.manual.ask(name, NotifyReleaseGpus(self.manual.key(), name, cluster))

    @rule(name=names, pick=st.integers(0, 1), num=st.sampled_from([0, 8]))
    def gives_one_thing_up_for_another(self, name: str, pick: int, num: int) -> None:
        each = self._cast(name)
        held = next(iter(each.held), "")
        wanted = GENERATION_CLUSTER if held else self._cluster(name, pick)
        self.manual.ask(
            name,
            NotifyReleaseThenRequestGpus(
                key=self.manual.key(),
                pipeline_id=name,
                release_cluster=held or GENERATION_CLUSTER,
                cluster=wanted,
                priority=PRIORITIES.get(wanted, GpuPriority.GENERATION),
                step_target_estimate=num,
            ),
        )

    @rule(name=names, completed=st.integers(0, 51))
    def reports_or_retires(self, name: str, completed: int) -> None:
        if completed > MAX_COMPLETED:
            self.manual.tell(name, ClearProgress(name, "train", self.batch))
            return
        self.batch += completed == 0
        # Hooks report a batch that has begun after waiting for its demand.
        if self._cast(name).is_generating:
            self.manual.tell(name, ReportProgress(name, "train", self.batch, 40, completed))

    # coordinators

    @rule(name=names, fails=st.sampled_from([False, False, False, True]))
    def carries_out_a_resize(self, name: str, fails: bool) -> None:
        resizes = self._cast(name).pending_resizes
        if resizes:
            self.manual.carry_out(name, min(resizes), fails=fails)

    @rule(name=names)
    def forgets_its_resizes(self, name: str) -> None:
        self._cast(name).pending_resizes.clear()

    @rule(name=names)
    def repairs_its_engines(self, name: str) -> None:
        self.manual.repair(name)

    # time, and restarts of the scheduler

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.manual.advance(seconds)
        self.manual.greet()

    @rule()
    def scheduler_is_killed(self) -> None:
        self.manual.die()

    @rule(name=names, num=st.sampled_from([0, 8]))
    def scheduler_is_killed_before_it_answers(self, name: str, num: int) -> None:
        ask = RequestGpus(
            self.manual.key(), name, GENERATION_CLUSTER, GpuPriority.GENERATION, 0, num
        )
        self._cast(name).open[ask.key] = ask
        self.manual.die(after=ask)

    # invariants

    @invariant()
    def nothing_goes_wrong_inside(self) -> None:
        if hasattr(self, "manual"):
            assert self.manual.scheduler.state.problems == []

    def teardown(self) -> None:
        if hasattr(self, "manual"):
            self._bring_to_rest()

    # helpers

    def _cast(self, name: str) -> PipelineActors:
        return self.manual.cast[name]

    def _cluster(self, name: str, pick: int) -> str:
        clusters = list(self._cast(name).spec.clusters)
        return clusters[pick % len(clusters)]

    def _request(self, name: str, cluster: str, target: int) -> None:
        priority = PRIORITIES.get(cluster, GpuPriority.GENERATION)
        self.step += 1
        key = self.manual.key()
        self.manual.ask(name, RequestGpus(key, name, cluster, priority, self.step, target))

    def _bring_to_rest(self) -> None:
        """Let every coordinator obey and release each granted request a cycle later, until
        nothing waits.
        """
        manual = self.manual
        policy = policies.make_policy(self.policy)
        # Quarantine ends first; then the waiting requests are counted.
        for _ in range(math.ceil(SETTINGS.max_retry_s) + 10):
            self._obey()
            phases = {each.phase for each in manual.scheduler.state.fleet.pipelines.values()}
            if phases == {PipelinePhase.ADMITTED}:
                break
        num_waiting = sum(len(each.open) for each in manual.cast.values())
        num = math.ceil(policy.reserve_after_s) + CYCLES_A_REQUEST * (num_waiting + 2)
        for _ in range(num):
            if not any(each.open or each.has_something for each in manual.cast.values()):
                break
            self._give_up_all()
            self._obey()
        left = {name: each.open for name, each in manual.cast.items() if each.open}
        assert not left, f"after {num} cycles: {left}"
        self._leave()

    def _give_up_all(self) -> None:
        """Release all grants, so that the next may have the GPUs."""
        for name, each in self.manual.cast.items():
            waits = {ask.cluster for ask in each.open.values()}
            clusters = [*each.held, *[GENERATION_CLUSTER] * each.is_generating]
            for cluster in clusters:
                if cluster not in waits:
                    self.manual.ask(name, NotifyReleaseGpus(self.manual.key(), name, cluster))

    def _obey(self) -> None:
        for name, each in self.manual.cast.items():
            self.manual.repair(name)
            for resize_id in sorted(each.pending_resizes):
                self.manual.carry_out(name, resize_id)
        self.manual.cycle()

    def _leave(self) -> None:
        manual = self.manual
        for name in manual.cast:
            manual.tell("admission", UnregisterPipeline(manual.key(), name))
        for _ in range(10):
            self._obey()
        state = manual.scheduler.state.fleet
        assert not state.owners
        assert not state.requests
        assert not state.pipelines
        assert not manual.space.users()
        assert manual.disk.num_rows("intents") == 0


class GapRatioHistories(SchedulerHistories):
    policy = "gap-ratio"


HOW = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerHistories = SchedulerHistories.TestCase
TestSchedulerHistories.settings = HOW
TestGapRatioHistories = GapRatioHistories.TestCase
TestGapRatioHistories.settings = HOW
