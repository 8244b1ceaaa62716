"""Only a message with a pipeline's token, or the operator's, changes that pipeline."""

import msgspec
import pytest

from rollmesh.core.secret_files import hash_token
from rollmesh.scheduler.planning.policies.fair import Fair
from rollmesh.scheduler.planning.state import PipelinePhase
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
        """Its answers."""
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
def test_with_its_token_or_the_operators_a_message_is_carried_out(
    message: AnyMessage, token: str
) -> None:
    result = Fleet().send(signed(message, token))
    assert "token of a" not in repr(result)


def test_only_the_operator_registers() -> None:
    fleet = Fleet()
    other = msgspec.structs.replace(SPEC, pipeline_id="b")
    for token in ("", "of a"):
        [result] = fleet.send(RegisterPipeline(f"b-{token}", other, token, hash_token("x")))
        assert isinstance(result, SchedulerAnswered)
        assert result.error == "only the admission process of this scheduler registers pipelines"
    assert set(fleet.scheduler.state.pipeline_records) == {"a"}


def test_a_token_outlives_the_scheduler_and_is_in_no_row() -> None:
    fleet = Fleet()
    fleet.begin(fleet.disk)
    assert fleet.scheduler.state.fleet.pipelines["a"].phase is PipelinePhase.ADMITTED
    assert not any(b"of a" in raw for rows in fleet.rows().values() for raw in rows.values())
    [result] = fleet.send(KillPipeline("k", "a"))
    assert isinstance(result, SchedulerAnswered)
    assert not result.ok
    assert fleet.send(KillPipeline("k2", "a", token="of a")) == [SchedulerAnswered("k2", True)]


def test_a_token_that_was_lost_is_replaced_by_registering_again() -> None:
    fleet = Fleet()
    fleet.send(RegisterPipeline("again", SPEC, "operator", hash_token("new")))
    [result] = fleet.send(CheckKill("old", "a", token="of a"))
    assert isinstance(result, SchedulerAnswered)
    assert not result.ok
    assert fleet.send(CheckKill("new", "a", token="new")) == [SchedulerAnswered("new", True)]


def test_a_pipeline_that_was_registered_without_a_token_is_the_operators_alone() -> None:
    fleet = Fleet()
    fleet.scheduler.state.pipeline_records["a"].token_hash = ""
    [result] = fleet.send(KillPipeline("k", "a", token="of a"))
    assert result == SchedulerAnswered(
        "k", False, "a was registered without a token; register it again"
    )
