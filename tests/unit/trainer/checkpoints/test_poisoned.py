"""A step that ends the trainer twice in the same way is skipped at the next start."""

import threading

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import UserError, kind_and_place
from rollmesh.core.ids import GroupId
from rollmesh.serve.client.journal_entries import (
    AnyEntry,
    GroupKept,
    StateSaved,
    StepBegun,
    StepEnded,
    StepTaken,
)
from rollmesh.serve.client.journal_state import JournalPosition, JournalState
from rollmesh.trainer.checkpoints.recovery_plan import MAX_ERRORS, MAX_KILLS, poison_reason
from tests.unit.trainer.trainer_incarnations import (
    PATIENCE_S,
    SAMPLES,
    Killed,
    KilledHard,
    TrainerIncarnation,
    TrainerIncarnations,
)

ROOMY = JournalConfig()
SETTINGS = ("run.name=run", "trainer.num_steps=3", "trainer.checkpoint_steps=9")


def overflow() -> OverflowError:
    return OverflowError("int too large to convert to float")


def run(incarnation: TrainerIncarnation, num_groups: int) -> list[BaseException]:
    """Run the train loop, deliver `num_groups` groups, and return the error that ended it, if
    any."""
    ends: list[BaseException] = []

    def train() -> None:
        try:
            incarnation.loop.run(incarnation.recovery)
        except (OverflowError, ZeroDivisionError, UserError, Killed, KilledHard) as error:
            ends.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(num_groups):
        group_id, task = incarnation.receive_ask()
        incarnation.finish(group_id, task.id)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return ends


def test_step_that_raises_twice_in_the_same_way_is_skipped_at_the_next_start(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begin(ROOMY, *SETTINGS)
    incarnation.policy.raises_in_steps = {1: overflow()}
    assert run(incarnation, 2)
    incarnation = begin(ROOMY, *SETTINGS)
    assert [each.step for each in incarnation.recovery.redo] == [0, 1], "once may be an accident"
    incarnation.policy.raises_in_steps = {1: overflow()}
    assert run(incarnation, 0)

    incarnation = begin(ROOMY, *SETTINGS)
    assert [each.step for each in incarnation.recovery.redo] == [0]
    assert incarnation.recovery.next_step == 2
    [line] = incarnation.recovery.lines
    assert line.startswith("step 1 ended the trainer 2 times: OverflowError at")
    assert line.endswith("it is skipped and its groups are dropped")
    incarnation.policy.raises_in_steps = {1: overflow()}
    assert run(incarnation, 1) == []
    assert [row["step"] for row in incarnation.rows("metrics.jsonl")] == [0, 2]
    drops = incarnation.rows("drops.jsonl")
    assert [row["reason"].partition(":")[0] for row in drops] == ["poisoned_step"] * SAMPLES
    assert incarnation.tally.num_dropped == SAMPLES
    incarnation.tally.num_open = incarnation.pacer.num_open()
    assert incarnation.tally.summary()["num_lost"] == 0


def test_a_skipped_step_stays_skipped(begin: TrainerIncarnations) -> None:
    for _ in range(2):
        incarnation = begin(ROOMY, *SETTINGS)
        incarnation.policy.raises_in_steps = {0: overflow()}
        assert run(incarnation, 0 if incarnation.recovery.redo else 1)
    for _ in range(2):
        incarnation = begin(ROOMY, *SETTINGS)
        assert incarnation.recovery.redo == ()
        assert [each.step for each in incarnation.recovery.parted] == [0]
    assert run(incarnation, 2) == []
    assert begin(ROOMY, *SETTINGS).recovery.parted == (), "the checkpoint at the end knows it"


def test_step_that_raises_differently_the_second_time_is_redone(begin: TrainerIncarnations) -> None:
    incarnation = begin(ROOMY, *SETTINGS)
    incarnation.policy.raises_in_steps = {0: overflow()}
    assert run(incarnation, 1)
    incarnation = begin(ROOMY, *SETTINGS)
    incarnation.policy.raises_in_steps = {0: ZeroDivisionError()}
    assert run(incarnation, 0)
    incarnation = begin(ROOMY, *SETTINGS)
    assert [each.step for each in incarnation.recovery.redo] == [0]
    assert run(incarnation, 2) == []
    assert [row["step"] for row in incarnation.rows("metrics.jsonl")] == [0, 1, 2]


def test_a_step_in_which_the_trainer_is_killed_each_time_is_skipped(
    begin: TrainerIncarnations,
) -> None:
    """The first kill is in the step as it was taken, the others in the redone step."""
    for number in range(1 + MAX_KILLS):
        incarnation = begin(ROOMY, *SETTINGS)
        assert [each.step for each in incarnation.recovery.redo] == ([0] if number else [])
        incarnation.policy.raises_in_steps = {0: KilledHard()}
        assert run(incarnation, 0 if number else 1)
    incarnation = begin(ROOMY, *SETTINGS)
    assert incarnation.recovery.redo == ()
    assert incarnation.recovery.parted[0].reason.startswith(
        "poisoned_step: step 0 ended the trainer"
    )


def test_an_error_that_the_user_can_fix_is_no_fault_of_the_step(begin: TrainerIncarnations) -> None:
    for number in range(2 + MAX_KILLS):
        incarnation = begin(ROOMY, *SETTINGS)
        assert [each.step for each in incarnation.recovery.redo] == ([0] if number else [])
        incarnation.policy.raises_in_steps = {0: UserError("the disk is full; make room")}
        assert run(incarnation, 0 if number else 1)


def test_being_killed_after_a_redone_step_is_no_fault_of_the_step(
    begin: TrainerIncarnations,
) -> None:
    for number in range(2 + MAX_KILLS):
        incarnation = begin(ROOMY, *SETTINGS)
        assert [each.step for each in incarnation.recovery.redo] == ([0] if number else [])
        incarnation.policy.dies_in_step = 0
        assert run(incarnation, 0 if number else 1)


def deaths_after(*entries: AnyEntry) -> dict[int, tuple[str, ...]]:
    """Return the deaths in steps that a journal with these entries reports."""
    chronicle = JournalState()
    group_id = GroupId("r", 0)
    for at, entry in enumerate((GroupKept(group_id, 1, "w"), StepTaken(0, (group_id,)), *entries)):
        chronicle.replay(entry, JournalPosition(at, 0))
    return chronicle.deaths.by_step()


def test_only_deaths_of_one_launch_count_together() -> None:
    """A user may kill and resume a run three times without losing a step."""
    apart = deaths_after(*[StepBegun(0, launch) for launch in range(10)])
    assert [poison_reason(each) for each in apart.values()] == [""]
    alike = deaths_after(*[StepBegun(0, 7)] * MAX_KILLS)
    assert "killed under process 7" in poison_reason(alike[0])


def test_a_step_that_was_done_again_has_a_clean_record() -> None:
    assert deaths_after(StepEnded(0, "E"), StepBegun(0, 1), StepEnded(0)) == {}
    assert deaths_after(StepEnded(0, "E"), StateSaved(1)) == {}
    assert deaths_after(StepBegun(0, 1), StepBegun(0, 1), StepEnded(0, "E"))[0] == (
        "killed under process 1",
        "E",
    )


def test_an_error_is_known_by_its_kind_and_place() -> None:
    def fail(message: str) -> str:
        try:
            raise OverflowError(message)
        except OverflowError as error:
            return kind_and_place(error)

    assert fail("at 0x1") == fail("at 0x2")
    assert fail("").startswith("OverflowError at ")
    assert poison_reason([fail("")] * MAX_ERRORS)
    assert not poison_reason([fail("")] * (MAX_ERRORS - 1))
