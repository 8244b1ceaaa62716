"""A policy at work on a virtual clock: each plan is carried out, and moves take time.

- Measures what each pipeline had and lacked, in GPU seconds, against shares that the test gives.
- As in the service, credits are written back with each plan.
"""

from collections.abc import Mapping

from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.planning.state import AWAKE_PHASES, FleetState
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.scheduler.planning.fleets import carry_out

REST = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}


class GeneratingFleet:
    def __init__(self, state: FleetState, policy: SchedulingPolicy, switch_s: float = 0.0) -> None:
        self.state = state
        self.had_gpu_s = dict.fromkeys(state.pipelines, 0.0)
        self.num_plans = 0
        self.most_lag_s: dict[str, float] = dict.fromkeys(state.pipelines, 0.0)
        """The most that each pipeline ever lacked of the ideal, per GPU of a worker."""
        self._policy = policy
        self._switch_s = switch_s
        self._moving: list[tuple[float, str, int]] = []
        self._begun_s = state.now_s

    def run(self, until_s: float, ideal_gpus: Mapping[str, float] | None = None) -> None:
        """Plan when a move is done and when the policy wants to plan again."""
        while self.state.now_s < until_s:
            self._settle()
            again_s = self._plan()
            next_s = min([until_s, again_s, *(done_s for done_s, _, _ in self._moving)])
            assert next_s > self.state.now_s, "asks for the same moment forever"
            self._pass(next_s - self.state.now_s)
            self._note_lag(ideal_gpus or {})

    def awake(self, pipeline_id: str) -> set[int]:
        workers = self.state.pipelines[pipeline_id].workers
        return {each.rank for each in workers if each.phase in AWAKE_PHASES}

    def _plan(self) -> float:
        state = self.state
        made = carry_out(state, self._policy)
        self.num_plans += 1
        for pipeline_id, credit in made.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s = state.now_s
        for pipeline_id, pipeline in state.pipelines.items():
            for worker in pipeline.workers:
                if worker.phase in REST and worker.since_s == state.now_s:
                    done_s = state.now_s + self._switch_s
                    self._moving.append((done_s, pipeline_id, worker.rank))
        if self._switch_s == 0.0:
            self._settle()
        return made.again_s

    def _settle(self) -> None:
        for move in [each for each in self._moving if each[0] <= self.state.now_s]:
            self._moving.remove(move)
            _, pipeline_id, rank = move
            phase = self.state.pipelines[pipeline_id].workers[rank].phase
            self.state.move_worker(pipeline_id, rank, REST.get(phase, phase))

    def _pass(self, seconds: float) -> None:
        self.state.now_s += seconds
        for pipeline_id, pipeline in self.state.pipelines.items():
            self.had_gpu_s[pipeline_id] += seconds * len(self.awake(pipeline_id)) * pipeline.spec.tp

    def _note_lag(self, ideal_gpus: Mapping[str, float]) -> None:
        passed_s = self.state.now_s - self._begun_s
        for pipeline_id, gpus in ideal_gpus.items():
            lacked = gpus * passed_s - self.had_gpu_s[pipeline_id]
            lag_s = lacked / self.state.pipelines[pipeline_id].spec.tp
            self.most_lag_s[pipeline_id] = max(self.most_lag_s[pipeline_id], lag_s)
