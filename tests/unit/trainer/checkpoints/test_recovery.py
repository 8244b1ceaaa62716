"""A trainer continues from what an earlier incarnation left, with its counts, and reports it
once."""

from pathlib import Path

import msgspec
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, JournalConfig, RunConfig, StalePolicy, TrainerConfig
from rollmesh.core.errors import EnvError, UserError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Outcome, Task
from rollmesh.serve.client.arrivals import Dropped, StoredResult
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.journal import History, OpenAsk
from rollmesh.serve.client.journal_entries import GroupBooked, Published, StateSaved, StepTaken
from rollmesh.testing.client import ScriptedClient
from rollmesh.trainer.checkpoints import recovery
from rollmesh.trainer.checkpoints.recovery import ResumePoint
from rollmesh.trainer.checkpoints.recovery_plan import LoopState, plan_recovery
from rollmesh.trainer.checkpoints.store import CheckpointStore, SavedCheckpoint
from rollmesh.trainer.pacing import pacer
from rollmesh.trainer.reports.records import RunRecords, Tally, read_recoveries, restarts_of
from rollmesh.trainer.staleness import StalenessState
from tests.unit.trainer.pacing.pacer_stage import MANY, Stage
from tests.unit.trainer.pacing.test_pacer import ClientThatFinishes, drop_groups

NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    trainer = TrainerConfig(samples_per_group=4, groups_per_step=2, eval_rollouts=8)
    return Config(run=RunConfig(name="run", folder=str(tmp_path)), trainer=trainer)


def of(history: History, state: LoopState | None = None) -> ResumePoint:
    saved = SavedCheckpoint(Path("000003-step-9"), state, 1000) if state else None
    recovery = plan_recovery(state, history)
    return ResumePoint(saved, recovery, is_first=saved is None and history == History())


def test_two_trainers_never_write_one_journal(config: Config) -> None:
    first = recovery.open_client(config, NOWHERE)
    with pytest.raises(UserError, match=r"another process writes this journal; a run folder can"):
        recovery.open_client(config, NOWHERE)
    first.close()
    recovery.open_client(config, NOWHERE).close()


def test_a_damaged_journal_is_named_with_what_can_be_done(config: Config) -> None:
    client = recovery.open_client(config, NOWHERE)
    client.start(StateSaved())
    for policy_version in range(3):
        client.note_published(policy_version, 0)
    client.close()
    [segment] = (config.run_folder() / "journal").glob("*.journal")
    written = bytearray(segment.read_bytes())
    written[40] ^= 1  # in the first record; others follow
    segment.write_bytes(written)
    with pytest.raises(UserError, match=r"offset .* move journal/ and weights/ out of .*--resume"):
        recovery.open_client(config, NOWHERE)
    segment.unlink()
    recovery.open_client(config, NOWHERE).close()


def test_incarnation_that_only_connected_leaves_no_resume_point(tmp_path: Path) -> None:
    for _ in range(2):
        client = RolloutClient(NOWHERE, JournalConfig(), tmp_path, keep=True)
        found = recovery.find_resume_point(client, CheckpointStore(tmp_path))
        assert found.is_first
        client.start(found.recovery.saved)
        client.close()


@pytest.mark.parametrize("num_steps", [0, 4])  # 0: after an evaluation
def test_run_whose_checkpoints_are_all_damaged_does_not_silently_restart(
    config: Config, num_steps: int
) -> None:
    client = recovery.open_client(config, NOWHERE)
    client.start(StateSaved())
    for policy_version in (4, 5):  # the newest alone frees nothing
        client.note_saved(StateSaved(num_steps, policy_version, {"r": [(0, 8)]}))
    client.close()
    client = recovery.open_client(config, NOWHERE)
    pattern = f"no checkpoint is intact, and .* what the one of {num_steps} steps held"
    with pytest.raises(UserError, match=pattern):
        recovery.find_resume_point(client, CheckpointStore(config.run_folder()))
    client.close()


def test_journal_knows_evaluation_groups_whatever_the_settings(
    config: Config,
) -> None:
    tally = Tally()
    tally.num_evals, tally.num_asked, tally.reward_untrained = 8, 12, 0.5
    tally.num_trained = 8
    state = LoopState(num_steps=1, tally=tally.state(), step_of_version={0: 0, 1: 1})
    found = of(History(num_asked=8 + 5, evals={"r": [(0, 6)], "s": [(0, 2)]}), state)
    again = recovery.restored_tally(config, found)
    assert (again.num_evals, again.num_asked, again.num_trained) == (8, 5 * 4, 8)
    without = msgspec.structs.replace(config.trainer, eval_rollouts=0)
    changed = msgspec.structs.replace(config, trainer=without)
    assert recovery.restored_tally(changed, found).num_evals == 8


def test_requests_that_waited_for_journal_space_at_a_death_are_not_counted(
    config: Config,
) -> None:
    tally = Tally()
    tally.num_evals, tally.num_asked = 8, 12
    state = LoopState(num_steps=0, tally=tally.state())
    found = of(History(num_asked=6 + 2, evals={"r": [(0, 6)]}), state)
    held = recovery.restored_tally(config, found)
    assert (held.num_evals, held.num_asked) == (6, 2 * 4)
    without_a_journal = recovery.restored_tally(config, of(History(), state))
    assert (without_a_journal.num_evals, without_a_journal.num_asked) == (8, 12)


def test_journal_of_an_earlier_release_keeps_the_checkpoints_evaluation_count(
    config: Config,
) -> None:
    tally = Tally()
    tally.num_evals, tally.num_asked = 8, 12
    found = of(History(num_asked=8 + 5), LoopState(num_steps=1, tally=tally.state()))
    restored = recovery.restored_tally(config, found)
    assert (restored.num_evals, restored.num_asked) == (8, 5 * 4)


def test_pacing_continues_with_consumed_groups_and_the_newest_weights(config: Config) -> None:
    before = StalenessState(consumed=40, training=8, histogram={0: 30, 1: 18})
    state = LoopState(
        num_steps=6,
        policy_version=9,
        step_of_version={8: 5, 9: 6},
        staleness=msgspec.to_builtins(before, str_keys=True),
    )
    staleness = recovery.restored_staleness(
        config, of(History(published=(Published(10, 7),)), state)
    )
    assert (staleness.consumed, staleness.histogram) == (48, {0: 30, 1: 18})
    assert (staleness.published_step, staleness.running) == (7, 0)
    fresh = recovery.restored_staleness(config)
    assert (fresh.published_step, fresh.consumed) == (0, 0)


def test_each_restart_leaves_one_complete_row(config: Config, tmp_path: Path) -> None:
    records = RunRecords(tmp_path, SystemClock())
    recovery.report_resume(of(History()), records)
    assert restarts_of(tmp_path) == {"num_lives": 1, "num_steps_redone": 0}
    lost = GroupId("r", 5)
    history = History(
        num_asked=7,
        steps=(StepTaken(9, (lost,)),),
        drops=(
            GroupBooked(GroupId("r", 3), "deadline: no result within 5 s"),
            GroupBooked(GroupId("r", 4), "deadline: no result within 9 s"),
        ),
    )
    recovery.report_resume(of(history, LoopState(num_steps=9, policy_version=4)), records)
    recovery.report_resume(of(history), records)
    records.close()
    row, last = read_recoveries(tmp_path)
    assert row.pop("time_s") > 0
    assert row == {
        "life": 2,
        "savepoint": "000003-step-9",
        "num_steps": 9,
        "redone_steps": [],
        "num_ready": 0,
        "num_open": 0,
        "num_dropped": 2,
        "dropped_for": {"deadline": 2},
        "policy_version": 5,
        "lost": [f"step 9 is not redone: {lost}, which the journal has lost"],
        "gave_up": False,
    }
    assert (last["life"], last["savepoint"]) == (3, "")
    assert restarts_of(tmp_path)["num_lives"] == 3


def test_step_that_ends_every_trainer_is_not_repeated_forever(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, SystemClock())
    stuck = of(History(num_asked=7), LoopState(num_steps=9))
    recovery.report_resume(of(History(num_asked=7), LoopState(num_steps=8)), records)
    for _ in range(2):  # an operator's fix earns as many attempts again
        for _ in range(recovery.MAX_INCARNATIONS):
            recovery.report_resume(stuck, records)
        with pytest.raises(UserError, match=r"10 trainers in a row have died at step 9; logs"):
            recovery.report_resume(stuck, records)
    records.close()


def later_incarnation(tmp_path: Path, history: History, state: LoopState | None = None) -> Stage:
    """A pacer that continues from this resume point."""
    stage = Stage(tmp_path)
    recovery = plan_recovery(state, history)
    stage.tally.num_asked = recovery.num_asked * 4
    stage.pacer.resume(recovery)
    return stage


def earlier(seq: int) -> GroupId:
    return GroupId("before", seq)


def left(
    client: ScriptedClient, *seqs: int, outcomes: dict[int, Outcome] | None = None
) -> tuple[StoredResult, ...]:
    """Groups of an earlier incarnation whose results are on its disk."""
    for seq in seqs:
        client.asked[earlier(seq)] = (Task(id=f"t{seq}"), 4)
        client.finish(earlier(seq), outcomes)
    client.filed |= {each.group_id.seq: each for each in client.take(0.0)}
    return tuple(StoredResult(earlier(seq), 1, "worker-0", seq, 100) for seq in seqs)


def open_ask(seq: int, asked_step: int = 0) -> OpenAsk:
    task = Task(id=f"t{seq}")
    return OpenAsk(
        group_id=earlier(seq), task=task, num_samples=4, is_eval=False, asked_step=asked_step
    )


def test_groups_of_an_earlier_incarnation_count_as_ready_running_and_dropped(
    tmp_path: Path,
) -> None:
    filed = left(ScriptedClient(), 0, 1)
    drops = (GroupBooked(earlier(3), "deadline: no result within 5 s"),)
    history = History(results=filed, open_asks=(open_ask(2),), drops=drops, num_asked=4)
    stage = later_incarnation(tmp_path, history)
    # Three of four groups are admitted, so the bound leaves one.
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 1
    assert (stage.lost(), stage.tally.num_open, stage.tally.num_dropped) == (0, 16, 4)
    assert [drop["reason"] for drop in stage.rows("drops.jsonl")] == [drops[0].reason]
    stage.records.close()


def test_failures_of_earlier_incarnations_do_not_count_as_barren(tmp_path: Path) -> None:
    drops = tuple(GroupBooked(earlier(seq), "env_failed: no licence") for seq in range(400))
    stage = later_incarnation(
        tmp_path, History(drops=drops, open_asks=(open_ask(400),), num_asked=401)
    )
    assert [*stage.pacer.lifecycle.open_ids] == [earlier(400)]
    assert stage.pacer.lifecycle.gone == {"before": [(0, 400)]}
    assert (stage.tally.num_dropped, stage.lost()) == (400 * 4, 0)
    stage.client.drop(earlier(400), "env_failed: no licence")
    stage.pacer.collect(0.0)
    drop_groups(stage, 398)
    assert stage.lost() == 0
    stage.records.close()


@pytest.mark.parametrize("policy", ["wait", "drop", "requeue", "mask"])
@pytest.mark.parametrize("is_last_whole", [True, False])
def test_no_batch_is_taken_before_all_earlier_results_are_delivered(
    tmp_path: Path, policy: StalePolicy, is_last_whole: bool
) -> None:
    stage = Stage(tmp_path, policy=policy)
    filed = left(stage.client, 0, 1, 2)
    history = History(results=filed, published=(Published(1, 1),), num_asked=3)
    stage.tally.num_asked = 3 * 4
    stage.pacer.published(1)  # engines begin with the newest weights
    stage.pacer.resume(plan_recovery(LoopState(num_steps=1), history))
    # At the bound: what this step does not take is too old for the next.
    for seq in (0, 1):
        stage.client.hand_out(seq)
    stage.pacer.collect(0.0)
    assert stage.pacer.take(step=1) is None
    assert stage.pacer.pacing.ready == 2 * 4
    if is_last_whole:
        stage.client.hand_out(2)
    else:
        stage.client.drop(earlier(2), "infra_error: the record is cut off")
    batch = stage.batch(step=1)
    assert batch.group_ids() == [earlier(seq) for seq in range(2 + is_last_whole)]
    assert stage.lost() == 0
    stage.records.close()


def test_results_of_earlier_incarnations_do_not_count_as_barren(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacer, "UNTRAINABLE_ROUNDS", 1 / 100)  # one group is a sign
    stage = Stage(tmp_path)
    barren = dict.fromkeys(range(4), Outcome.AGENT_ERROR)
    filed = left(stage.client, 0, 1, outcomes=barren)
    stage.tally.num_asked = 2 * 4
    recovery = plan_recovery(None, History(results=filed, num_asked=2))
    stage.pacer.resume(recovery)
    for seq in (0, 1):
        stage.client.hand_out(seq)
    stage.pacer.collect(0.0)
    assert (stage.tally.num_dropped, stage.lost()) == (8, 0)
    stage.pacer.ask(num_needed=1)
    stage.client.finish(stage.open()[0], barren)
    with pytest.raises(EnvError, match=r"the last 1 groups had nothing to train"):
        stage.pacer.collect(0.0)
    stage.records.close()


def test_step_is_redone_with_its_own_groups(tmp_path: Path) -> None:
    client = ScriptedClient()
    filed = left(client, 0, 1, 2)
    again = StepTaken(0, (earlier(2), earlier(0)))
    stage = Stage(tmp_path, client)
    recovery = plan_recovery(None, History(results=filed, steps=(again,), num_asked=3))
    stage.tally.num_asked = 12
    stage.pacer.resume(recovery)
    assert stage.lost() == 0
    batch = stage.pacer.retake(again, recovery.results)
    assert batch is not None
    assert batch.group_ids() == [earlier(2), earlier(0)]
    assert (stage.pacer.pacing.training, stage.pacer.pacing.running) == (8, 4)
    stage.pacer.trained(batch)
    assert (stage.tally.num_trained, stage.lost()) == (8, 0)
    assert stage.pacer.lifecycle.gone == {"before": [(0, 1), (2, 3)]}
    # The third group, which no step took, arrives like any other.
    stage.client.hand_out(1)
    stage.pacer.collect(0.0)
    assert stage.pacer.pacing.ready == 4
    stage.records.close()


def test_unreadable_result_is_dropped_and_its_step_redone_without_it(
    tmp_path: Path,
) -> None:
    client = ScriptedClient()
    filed = left(client, 0, 1)
    client.filed[1] = Dropped(earlier(1), "infra_error: the record is cut off")
    stage = Stage(tmp_path, client)
    again = StepTaken(0, (earlier(0), earlier(1)))
    recovery = plan_recovery(None, History(results=filed, steps=(again,), num_asked=2))
    stage.tally.num_asked = 8
    stage.pacer.resume(recovery)
    batch = stage.pacer.retake(again, recovery.results)
    assert batch is not None
    assert batch.group_ids() == [earlier(0)]
    assert (stage.tally.num_dropped, stage.lost()) == (4, 0)
    client.filed[0] = Dropped(earlier(0), "infra_error: the record is cut off")
    assert stage.pacer.retake(StepTaken(1, (earlier(0),)), recovery.results) is None
    stage.records.close()


def test_group_that_has_left_does_not_leave_again(tmp_path: Path) -> None:
    state = LoopState(num_steps=1, ended={"before": [(0, 5)]}, num_tasks=5)
    stage = later_incarnation(tmp_path, History(num_asked=5, num_drawn=6), state)
    assert stage.pacer.lifecycle.num_gone == 5
    stage.pacer.ask(MANY)
    assert stage.pacer.requester.num_drawn == 6 + 4
    stage.records.close()


def test_evaluation_continues_where_an_earlier_incarnation_left_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ClientThatFinishes())
    open_eval = OpenAsk(
        group_id=earlier(2), task=Task(id="t2"), num_samples=1, is_eval=True, asked_step=0
    )
    drops = (GroupBooked(earlier(0), "env_failed: no licence"),)
    evals = {"before": [(0, 3)]}
    history = History(open_asks=(open_eval,), drops=drops, evals=evals, num_asked=2, num_drawn=2)
    stage.tally.num_evals = 2
    stage.pacer.resume(plan_recovery(None, history))
    stage.client.asked[earlier(2)] = (Task(id="t2"), 1)
    assert stage.measured(5) == [0.0] * 4
    assert (stage.tally.num_evals, stage.lost(), stage.tally.num_dropped) == (5, 0, 0)
    [drop] = stage.rows("drops.jsonl")
    assert drop["reason"] == "evaluation: env_failed: no licence"
    stage.records.close()
