"""Only one run at a time has a pipeline's name, and the next finds nothing of a dead one."""

import msgspec

from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.coordinators import LIVE_S
from rollmesh.scheduler.service.registry import PipelineRegistry, RunClaims
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    CheckKill,
    ClaimPipeline,
    HooksWired,
    KillPipeline,
    RunClaim,
    TicketState,
    WorkerPhase,
    WorkerTruth,
)
from tests.unit.scheduler.service.stage import SETTINGS, TRAIN, Coordinator, Stage


def unclaimed(**fields: object) -> Stage:
    """Pipeline `a`, which no run uses."""
    stage = Stage(**fields)  # type: ignore[arg-type]  # of the stage
    stage.pipeline("a", train=(0,), generation=(0, 1)).is_silent = True
    stage.run(LIVE_S)
    return stage


def begin(stage: Stage, started_s: float) -> None:
    """A run's coordinator and hooks."""
    coordinator = stage.coordinators["a"] = Coordinator("a", 2, started_s)
    stage.send(coordinator.hello(), coordinator.route)
    stage.send(HooksWired("a"))


def run_of(run_id: str, **fields: object) -> RunClaim:
    return RunClaim(run_id, "h", 7, **fields)  # type: ignore[arg-type]  # of the claim


def claim(stage: Stage, run: RunClaim | None, after: str = "") -> str:
    """The reason of the refusal, or ''."""
    key = f"claim-{len(stage.answers)}"
    stage.send(ClaimPipeline(key, "a", run, after))
    return stage.answers[key].error


def test_of_two_runs_that_take_a_name_in_the_same_moment_one_is_refused() -> None:
    stage = unclaimed()
    assert claim(stage, run_of("one")) == ""
    assert claim(stage, run_of("two")) == "another run has that name and is active"
    assert stage.scheduler.explain_context().runs == {"a": run_of("one")}
    stage.begin()
    assert claim(stage, run_of("two")) == "another run has that name and is active", (
        "it is journalled"
    )


def test_a_run_without_a_claim_keeps_its_name_as_the_scheduler_is_started_again() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.begin()  # and that run is not heard yet
    assert claim(stage, run_of("one")) == "another run has that name and is active"
    stage.coordinators["a"].is_silent = True
    stage.run(LIVE_S)
    assert claim(stage, run_of("one")) == ""


def test_of_two_that_follow_a_dead_run_one_is_refused() -> None:
    stage = unclaimed()
    assert claim(stage, run_of("dead")) == ""
    assert claim(stage, run_of("one"), after="dead") == ""
    assert claim(stage, run_of("two"), after="dead") == "another run has that name and is active"
    assert stage.scheduler.explain_context().runs["a"].run_id == "one"


class LastWins(RunClaims):
    """The fault: any run may claim a name."""

    def on_claim(self, ask: ClaimPipeline) -> str:
        run = self._state.pipeline_records[ask.pipeline_id].run
        return super().on_claim(msgspec.structs.replace(ask, after=run.run_id if run else ""))


class Careless(FleetScheduler):
    class REGISTRY(PipelineRegistry):
        RUN_CLAIMS = LastWins


def test_were_names_not_compared_two_runs_would_have_one() -> None:
    stage = unclaimed(kind=Careless)
    assert claim(stage, run_of("one")) == claim(stage, run_of("two")) == ""


def test_a_run_that_follows_a_dead_one_finds_nothing_of_it() -> None:
    stage = unclaimed()
    claim(stage, run_of("dead"))
    begin(stage, started_s=2.0)
    stage.generate("a", "g")
    stage.act()
    stage.train("a", "t")
    stage.act()
    old = stage.coordinators["a"]
    old.is_silent = True
    stage.run(SETTINGS.coordinator_grace_s + 1.0)
    assert stage.of("a").phase is PipelinePhase.QUARANTINED
    old.truths = [WorkerTruth(rank, WorkerPhase.ASLEEP, 0) for rank in range(2)]
    assert claim(stage, run_of("next"), after="dead") == ""
    pipeline = stage.of("a")
    assert (pipeline.phase, pipeline.holds, pipeline.demand) == (PipelinePhase.ADMITTED, {}, None)
    assert {each.phase for each in pipeline.workers} == {WorkerPhase.ASLEEP}
    assert stage.scheduler.state.fleet.owners == {}
    begin(stage, started_s=3.0)
    assert stage.train("a", "t2") is TicketState.GRANTED


def test_engines_that_are_not_a_runs_own_outlive_it_and_stay_fenced() -> None:
    stage = unclaimed()
    claim(stage, run_of("dead", owns_engines=False))
    begin(stage, started_s=2.0)
    stage.generate("a", "g")
    stage.act()
    assert stage.awake("a") == [0, 1]
    stage.coordinators["a"].is_silent = True
    assert claim(stage, None, after="dead") == ""
    pipeline = stage.of("a")
    assert (pipeline.holds, pipeline.demand) == ({}, None)
    assert stage.awake("a") == [0, 1], "no resize has put them to sleep"


def test_a_run_that_ends_after_another_has_its_name_takes_nothing_from_it() -> None:
    stage = unclaimed()
    claim(stage, run_of("dead"))
    claim(stage, run_of("next"), after="dead")
    begin(stage, started_s=2.0)
    stage.train("a", "t")
    stage.act()
    assert claim(stage, None, after="dead") == ""
    assert stage.scheduler.explain_context().runs["a"].run_id == "next"
    assert list(stage.of("a").holds) == [TRAIN]


def test_an_active_or_unadmitted_pipeline_cannot_be_claimed() -> None:
    stage = Stage()
    stage.pipeline("a")
    assert claim(stage, run_of("one")) == "another run has that name and is active"
    stage.send(KillPipeline("k", "a"))
    assert claim(stage, run_of("one")) == "a is registered, and not admitted"


def test_a_killed_pipeline_is_unclaimed() -> None:
    stage = unclaimed()
    claim(stage, run_of("one"))
    stage.send(KillPipeline("k", "a"))
    stage.send(AdmitPipeline("again", "a"))
    assert stage.scheduler.explain_context().runs == {}
    stage.coordinators["a"].is_silent = True
    assert claim(stage, run_of("two")) == ""


def test_processes_may_be_ended_only_of_the_run_that_has_the_name() -> None:
    stage = unclaimed()
    stage.send(CheckKill("1", "a"))
    claim(stage, run_of("one"))
    for number, ask in enumerate((CheckKill("2", "a", "one"), CheckKill("3", "a", "two")), 2):
        stage.send(ask)
        assert stage.answers[str(number)].ok is (number == 2)
    stage.send(CheckKill("4", "nope", ""))
    result = [stage.answers[key].error for key in ("1", "3", "4")]
    assert result == ["", "another run has the name a", "no pipeline 'nope'; a registered"]


def test_a_kill_that_comes_after_the_next_run_has_the_name_frees_nothing() -> None:
    stage = unclaimed()
    claim(stage, run_of("one"))
    claim(stage, run_of("two"), after="one")
    stage.send(KillPipeline("k", "a", "one"))
    assert stage.answers["k"].error == "another run has the name a"
    assert stage.scheduler.explain_context().runs["a"].run_id == "two"
