"""Run claims: one run at a time has a pipeline's name, and only messages with its token or the
operator's change the pipeline.
"""

import msgspec
import pytest

from rollmesh.core.secret_files import hash_token
from rollmesh.scheduler.planning.policies.fair import Fair
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.coordinators import LIVE_S
from rollmesh.scheduler.service.registry import PipelineRegistry, RunClaims
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import JournalTables, SchedulerSettings, WriteRows
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    CheckKill,
    ClaimPipeline,
    ClearProgress,
    CoordinatorHello,
    HooksWired,
    JoinNode,
    KillPipeline,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    PipelineSpec,
    RegisterPipeline,
    ReportPreempt,
    ReportProgress,
    RequestGpus,
    RunClaim,
    SchedulerAnswered,
    SchedulerHello,
    TakeGpus,
    TicketMoved,
    TicketState,
    UnregisterPipeline,
    WithdrawRequest,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
    signed,
)
from tests.unit.scheduler.service.harness import SETTINGS, TRAIN, Coordinator, SchedulerHarness


def unclaimed(**fields: object) -> SchedulerHarness:
    """Pipeline `a`, which no run uses."""
    harness = SchedulerHarness(**fields)  # type: ignore[arg-type]  # of the harness
    harness.pipeline("a", train=(0,), generation=(0, 1)).is_silent = True
    harness.run(LIVE_S)
    return harness


def begin(harness: SchedulerHarness, started_s: float) -> None:
    """Connect a run's coordinator and hooks."""
    coordinator = harness.coordinators["a"] = Coordinator("a", 2, started_s)
    harness.send(coordinator.hello(), coordinator.route)
    harness.send(HooksWired("a"))


def run_of(run_id: str, **fields: object) -> RunClaim:
    return RunClaim(run_id, "h", 7, **fields)  # type: ignore[arg-type]  # of the claim


def claim(harness: SchedulerHarness, run: RunClaim | None, after: str = "") -> str:
    """Claim the name; return the reason of the refusal, or ''."""
    key = f"claim-{len(harness.answers)}"
    harness.send(ClaimPipeline(key, "a", run, after))
    return harness.answers[key].error


def test_if_two_runs_claim_a_name_at_once_one_is_refused() -> None:
    harness = unclaimed()
    assert claim(harness, run_of("one")) == ""
    assert claim(harness, run_of("two")) == "another run has that name and is active"
    assert harness.scheduler.explain_context().runs == {"a": run_of("one")}
    harness.begin()
    assert claim(harness, run_of("two")) == "another run has that name and is active", (
        "it is journalled"
    )


def test_a_run_without_a_claim_keeps_its_name_over_a_scheduler_restart() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.begin()  # no report of that run has arrived yet
    assert claim(harness, run_of("one")) == "another run has that name and is active"
    harness.coordinators["a"].is_silent = True
    harness.run(LIVE_S)
    assert claim(harness, run_of("one")) == ""


def test_if_two_runs_follow_a_dead_one_one_is_refused() -> None:
    harness = unclaimed()
    assert claim(harness, run_of("dead")) == ""
    assert claim(harness, run_of("one"), after="dead") == ""
    assert claim(harness, run_of("two"), after="dead") == "another run has that name and is active"
    assert harness.scheduler.explain_context().runs["a"].run_id == "one"


class LastWins(RunClaims):
    """The fault: any run may claim a name."""

    def on_claim(self, ask: ClaimPipeline) -> str:
        run = self._state.pipeline_records[ask.pipeline_id].run
        return super().on_claim(msgspec.structs.replace(ask, after=run.run_id if run else ""))


class SharesNames(FleetScheduler):
    class REGISTRY(PipelineRegistry):
        RUN_CLAIMS = LastWins


def test_if_names_were_not_compared_two_runs_would_share_one() -> None:
    harness = unclaimed(kind=SharesNames)
    assert claim(harness, run_of("one")) == claim(harness, run_of("two")) == ""


def test_a_run_that_follows_a_dead_one_starts_without_its_state() -> None:
    harness = unclaimed()
    claim(harness, run_of("dead"))
    begin(harness, started_s=2.0)
    harness.generate("a", "g")
    harness.act()
    harness.train("a", "t")
    harness.act()
    old = harness.coordinators["a"]
    old.is_silent = True
    harness.run(SETTINGS.coordinator_grace_s + 1.0)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED
    old.truths = [WorkerTruth(rank, WorkerPhase.ASLEEP, 0) for rank in range(2)]
    assert claim(harness, run_of("next"), after="dead") == ""
    pipeline = harness.of("a")
    assert (pipeline.phase, pipeline.holds, pipeline.demand) == (PipelinePhase.ADMITTED, {}, None)
    assert {each.phase for each in pipeline.workers} == {WorkerPhase.ASLEEP}
    assert harness.scheduler.state.fleet.owners == {}
    begin(harness, started_s=3.0)
    assert harness.train("a", "t2") is TicketState.GRANTED


def test_engines_that_a_run_does_not_own_survive_it_and_stay_fenced() -> None:
    harness = unclaimed()
    claim(harness, run_of("dead", owns_engines=False))
    begin(harness, started_s=2.0)
    harness.generate("a", "g")
    harness.act()
    assert harness.awake("a") == [0, 1]
    harness.coordinators["a"].is_silent = True
    assert claim(harness, None, after="dead") == ""
    pipeline = harness.of("a")
    assert (pipeline.holds, pipeline.demand) == ({}, None)
    assert harness.awake("a") == [0, 1], "no resize has put them to sleep"


def test_a_run_that_ends_late_takes_nothing_from_its_successor() -> None:
    harness = unclaimed()
    claim(harness, run_of("dead"))
    claim(harness, run_of("next"), after="dead")
    begin(harness, started_s=2.0)
    harness.train("a", "t")
    harness.act()
    assert claim(harness, None, after="dead") == ""
    assert harness.scheduler.explain_context().runs["a"].run_id == "next"
    assert list(harness.of("a").holds) == [TRAIN]


def test_an_active_or_unadmitted_pipeline_cannot_be_claimed() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    assert claim(harness, run_of("one")) == "another run has that name and is active"
    harness.send(KillPipeline("k", "a"))
    assert claim(harness, run_of("one")) == "a is registered, and not admitted"


def test_a_killed_pipeline_is_unclaimed() -> None:
    harness = unclaimed()
    claim(harness, run_of("one"))
    harness.send(KillPipeline("k", "a"))
    harness.send(AdmitPipeline("again", "a"))
    assert harness.scheduler.explain_context().runs == {}
    harness.coordinators["a"].is_silent = True
    assert claim(harness, run_of("two")) == ""


def test_only_the_run_that_has_the_name_may_be_killed() -> None:
    harness = unclaimed()
    harness.send(CheckKill("1", "a"))
    claim(harness, run_of("one"))
    for number, ask in enumerate((CheckKill("2", "a", "one"), CheckKill("3", "a", "two")), 2):
        harness.send(ask)
        assert harness.answers[str(number)].ok is (number == 2)
    harness.send(CheckKill("4", "nope", ""))
    errors = [harness.answers[key].error for key in ("1", "3", "4")]
    assert errors == ["", "another run has the name a", "no pipeline 'nope'; a registered"]


def test_a_late_kill_of_a_run_frees_nothing_of_its_successor() -> None:
    harness = unclaimed()
    claim(harness, run_of("one"))
    claim(harness, run_of("two"), after="one")
    harness.send(KillPipeline("k", "a", "one"))
    assert harness.answers["k"].error == "another run has the name a"
    assert harness.scheduler.explain_context().runs["a"].run_id == "two"


SPEC = PipelineSpec(pipeline_id="a", clusters={"actor_train": (0,)}, generation=(0,))
TRUTH = (WorkerTruth(0, WorkerPhase.ASLEEP, 0),)
REFUSED = TicketState.REFUSED
CHANGES: tuple[AnyMessage, ...] = (
    HooksWired("a"),
    RequestGpus("new", "a", "actor_train", 1),
    NotifyReleaseGpus("new", "a", "actor_train"),
    NotifyReleaseThenRequestGpus("new", "a", "actor_train", "actor_infer", 6),
    TakeGpus("t", 1),
    WithdrawRequest("t"),
    ReportProgress("a", "train", 1, 8, 3),
    ClearProgress("a", "train", 1),
    ReportPreempt("a", 0, "http://e:1"),
    CoordinatorHello("a", TRUTH, 2.0),
    WorkersResized("a", 1, TRUTH),
    AdmitPipeline("new", "a"),
    CheckKill("new", "a"),
    KillPipeline("new", "a"),
    UnregisterPipeline("new", "a"),
    ClaimPipeline("new", "a", RunClaim("r", "h", 7)),
)


class Fleet:
    """A scheduler with an operator, and pipeline `a` with a token, which requests GPUs."""

    def __init__(self) -> None:
        self.disk = JournalTables()
        self.now_s = 0.0
        self.begin(None)
        self.send(JoinNode("n", "n0", 1, beats=False))
        self.send(RegisterPipeline("r", SPEC, "operator", hash_token("of a")))
        self.send(AdmitPipeline("ad", "a", "operator"))
        self.send(HooksWired("a", "of a"))
        self.send(CoordinatorHello("a", TRUTH, 1.0, "of a"))
        assert self.send(RequestGpus("t", "a", "actor_train", 1, token="of a"))

    def begin(self, revived: JournalTables | None) -> None:
        operator_hash = hash_token("operator")
        self.scheduler = FleetScheduler(SchedulerSettings(), Fair(), revived, "s", operator_hash)

    def send(self, message: AnyMessage) -> list[AnyMessage]:
        """Send a message; return the answers."""
        self.now_s += 0.1
        actions = self.scheduler.step(Received(b"peer", message), self.now_s)
        for each in actions:
            if isinstance(each, WriteRows):
                self.disk.keep(each.rows)
        return [each.message for each in actions if isinstance(each, Send)]

    def rows(self) -> dict[str, dict[str, bytes]]:
        """Kept rows of pipelines, without the time of the last write."""
        tables = self.disk.tables
        return {name: dict(tables[name]) for name in tables if name not in ("numbers", "answers")}


@pytest.mark.parametrize("token", ["", "of b"])
@pytest.mark.parametrize("message", CHANGES, ids=lambda each: type(each).__name__)
def test_a_request_without_the_pipelines_token_is_refused_and_changes_nothing(
    message: AnyMessage, token: str
) -> None:
    fleet = Fleet()
    before = fleet.rows()
    result = fleet.send(signed(message, token))
    assert fleet.rows() == before
    whys = [
        getattr(each, "error", "") or getattr(each, "reason", "")
        for each in result
        if isinstance(each, SchedulerAnswered | SchedulerHello | TicketMoved)
    ]
    silent = isinstance(message, ReportProgress | ClearProgress | ReportPreempt | WorkersResized)
    line = f"the token of a is {'wrong' if token else 'missing'}: `rollmesh scheduler register`"
    assert [why.startswith(line) for why in whys] == [True] * (not silent)


@pytest.mark.parametrize("token", ["of a", "operator"])
@pytest.mark.parametrize("message", CHANGES, ids=lambda each: type(each).__name__)
def test_a_message_with_the_pipelines_or_the_operators_token_is_carried_out(
    message: AnyMessage, token: str
) -> None:
    result = Fleet().send(signed(message, token))
    assert "token of a" not in repr(result)


def test_only_the_operator_registers_pipelines() -> None:
    fleet = Fleet()
    other = msgspec.structs.replace(SPEC, pipeline_id="b")
    for token in ("", "of a"):
        [result] = fleet.send(RegisterPipeline(f"b-{token}", other, token, hash_token("x")))
        assert isinstance(result, SchedulerAnswered)
        assert result.error == "only the admission process of this scheduler registers pipelines"
    assert set(fleet.scheduler.state.pipeline_records) == {"a"}


def test_a_token_survives_a_restart_and_is_stored_in_no_row() -> None:
    fleet = Fleet()
    fleet.begin(fleet.disk)
    assert fleet.scheduler.state.fleet.pipelines["a"].phase is PipelinePhase.ADMITTED
    assert not any(b"of a" in raw for rows in fleet.rows().values() for raw in rows.values())
    [result] = fleet.send(KillPipeline("k", "a"))
    assert isinstance(result, SchedulerAnswered)
    assert not result.ok
    assert fleet.send(KillPipeline("k2", "a", token="of a")) == [SchedulerAnswered("k2", True)]


def test_a_lost_token_is_replaced_by_registering_again() -> None:
    fleet = Fleet()
    fleet.send(RegisterPipeline("again", SPEC, "operator", hash_token("new")))
    [result] = fleet.send(CheckKill("old", "a", token="of a"))
    assert isinstance(result, SchedulerAnswered)
    assert not result.ok
    assert fleet.send(CheckKill("new", "a", token="new")) == [SchedulerAnswered("new", True)]


def test_a_pipeline_registered_without_a_token_accepts_only_the_operators() -> None:
    fleet = Fleet()
    fleet.scheduler.state.pipeline_records["a"].token_hash = ""
    [result] = fleet.send(KillPipeline("k", "a", token="of a"))
    assert result == SchedulerAnswered(
        "k", False, "a was registered without a token; register it again"
    )
