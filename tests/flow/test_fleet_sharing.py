"""Scripted pipelines as real processes on four slots: more pipelines than slots, a scheduler that
is killed repeatedly, an engine that hangs.
"""

from collections import Counter
from pathlib import Path

import pytest

from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.testing.pipeline import Ended, StepDone
from rollmesh.wire.scheduling import WorkerPhase
from tests.flow.scripted_fleet import ENDS_WITHIN_S, ScriptedFleet
from tests.flow.worker_mesh import look_until

pytestmark = pytest.mark.slow

NUM_STEPS = 3
EIGHT = {f"p{index}": [index % 4] for index in range(6)} | {"p6": [0, 1], "p7": [0, 1, 2, 3]}
TWO = {"ill": [0, 1], "well": [2, 3]}


def check_given_back(fleet: ScriptedFleet) -> None:
    """Check that soon no pipeline holds or requests anything, and all may request again."""

    def are_at_rest() -> bool:
        return all(
            (view.has_demand, view.holds, view.waits) == (False, {}, ())
            and {worker.phase for worker in view.workers} == {WorkerPhase.ASLEEP}
            for view in fleet.view().pipelines
        )

    look_until(are_at_rest)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_kills", [0, 3])
def test_eight_pipelines_on_four_slots_all_finish(tmp_path: Path, num_kills: int) -> None:
    """With three kills also: each after a step of one pipeline, at any point of the others."""
    with ScriptedFleet(tmp_path, EIGHT) as fleet:
        runs = [fleet.begin(name, "--steps", str(NUM_STEPS)) for name in EIGHT]
        steps: Counter[str] = Counter()
        ended = []
        for line in fleet.lines():
            if isinstance(line, Ended):
                ended.append(line.pipeline)
                continue
            steps[line.pipeline] += 1
            if num_kills and steps.total() % 5 == 0:
                num_kills -= 1
                fleet.kill_scheduler()
        assert sorted(ended) == sorted(EIGHT)
        assert steps == dict.fromkeys(EIGHT, NUM_STEPS)
        assert [run.wait(ENDS_WITHIN_S) for run in runs] == [0] * len(EIGHT)
        assert num_kills == 0
        check_given_back(fleet)


@pytest.mark.timeout(240)
def test_a_pipeline_with_a_hung_engine_is_fenced_and_the_other_finishes(tmp_path: Path) -> None:
    with ScriptedFleet(tmp_path, TWO) as fleet:
        ill = fleet.begin("ill", "--steps", "50", "--hang-at", "1")
        well = fleet.begin("well", "--steps", "5")
        messages = []
        for line in fleet.lines():
            messages += [line] if line.pipeline == "well" else []
            if isinstance(line, Ended):
                break
        assert [each.step for each in messages if isinstance(each, StepDone)] == list(range(5))
        assert isinstance(messages[-1], Ended)
        assert well.wait(ENDS_WITHIN_S) == 0
        views = {view.pipeline_id: view for view in fleet.view().pipelines}
        assert views["well"].phase is PipelinePhase.ADMITTED
        assert ill.poll() is None
        ill.kill()
