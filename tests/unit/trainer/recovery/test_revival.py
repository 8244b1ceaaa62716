"""A trainer goes on from what an earlier life left, with its counts, and says so in one place."""

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
from rollmesh.trainer.books.records import RunRecords, Tally, lives_of, read_recoveries
from rollmesh.trainer.pacing import pacer
from rollmesh.trainer.recovery import revival
from rollmesh.trainer.recovery.plan import plan_recovery
from rollmesh.trainer.recovery.revival import Revival
from rollmesh.trainer.savepoints.shelf import Saved, Savepoints
from rollmesh.trainer.savepoints.state import LoopState
from rollmesh.trainer.staleness import StalenessState
from tests.unit.trainer.pacing.pacer_stage import MANY, Stage
from tests.unit.trainer.pacing.test_pacer import ClientThatFinishes, drop_groups

NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    trainer = TrainerConfig(samples_per_group=4, groups_per_step=2, eval_rollouts=8)
    return Config(run=RunConfig(name="run", folder=str(tmp_path)), trainer=trainer)


def of(history: History, state: LoopState | None = None) -> Revival:
    saved = Saved(Path("000003-step-9"), state, 1000) if state else None
    recovery = plan_recovery(state, history)
    return Revival(saved, recovery, is_first=saved is None and history == History())


def test_two_trainers_never_write_one_journal(config: Config) -> None:
    first = revival.open_client(config, NOWHERE)
    with pytest.raises(UserError, match=r"another process writes this journal; a run has one"):
        revival.open_client(config, NOWHERE)
    first.close()
    revival.open_client(config, NOWHERE).close()


def test_a_damaged_journal_is_named_with_what_can_be_done(config: Config) -> None:
    client = revival.open_client(config, NOWHERE)
    client.start(StateSaved())
    for policy_version in range(3):
        client.note_published(policy_version, 0)
    client.close()
    [segment] = (config.run_folder() / "journal").glob("*.journal")
    written = bytearray(segment.read_bytes())
    written[40] ^= 1  # within the first record, which others follow
    segment.write_bytes(written)
    with pytest.raises(UserError, match=r"offset .* move journal/ and weights/ out of .*--resume"):
        revival.open_client(config, NOWHERE)
    segment.unlink()
    revival.open_client(config, NOWHERE).close()


def test_a_life_that_only_said_hello_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    for _ in range(2):
        client = RolloutClient(NOWHERE, JournalConfig(), tmp_path, keep=True)
        found = revival.find(client, Savepoints(tmp_path))
        assert found.is_first
        client.start(found.recovery.saved)
        client.close()


@pytest.mark.parametrize("num_steps", [0, 4])  # 0: made after an evaluation
def test_a_run_whose_savepoints_are_all_broken_is_not_begun_anew_in_silence(
    config: Config, num_steps: int
) -> None:
    client = revival.open_client(config, NOWHERE)
    client.start(StateSaved())
    for policy_version in (4, 5):  # the newest alone frees nothing
        client.note_saved(StateSaved(num_steps, policy_version, {"r": [(0, 8)]}))
    client.close()
    client = revival.open_client(config, NOWHERE)
    told = f"none of its savepoints is whole, and .* what that of {num_steps} steps held"
    with pytest.raises(UserError, match=told):
        revival.find(client, Savepoints(config.run_folder()))
    client.close()


def test_what_an_evaluation_has_asked_for_is_told_by_the_journal_whatever_the_settings_are(
    config: Config,
) -> None:
    tally = Tally()
    tally.num_evals, tally.num_asked, tally.reward_untrained = 8, 12, 0.5
    tally.num_trained = 8
    state = LoopState(num_steps=1, tally=tally.state(), step_of_version={0: 0, 1: 1})
    found = of(History(num_asked=8 + 5, evals={"r": [(0, 6)], "s": [(0, 2)]}), state)
    again = revival.restored_tally(config, found)
    assert (again.num_evals, again.num_asked, again.num_trained) == (8, 5 * 4, 8)
    without = msgspec.structs.replace(config.trainer, eval_rollouts=0)
    changed = msgspec.structs.replace(config, trainer=without)
    assert revival.restored_tally(changed, found).num_evals == 8


def test_what_waited_for_room_in_the_journal_when_its_trainer_died_was_never_asked_for(
    config: Config,
) -> None:
    tally = Tally()
    tally.num_evals, tally.num_asked = 8, 12
    state = LoopState(num_steps=0, tally=tally.state())
    found = of(History(num_asked=6 + 2, evals={"r": [(0, 6)]}), state)
    held = revival.restored_tally(config, found)
    assert (held.num_evals, held.num_asked) == (6, 2 * 4)
    without_a_journal = revival.restored_tally(config, of(History(), state))
    assert (without_a_journal.num_evals, without_a_journal.num_asked) == (8, 12)


def test_a_journal_of_an_earlier_release_leaves_the_evaluation_as_the_savepoint_knows_it(
    config: Config,
) -> None:
    tally = Tally()
    tally.num_evals, tally.num_asked = 8, 12
    found = of(History(num_asked=8 + 5), LoopState(num_steps=1, tally=tally.state()))
    restored = revival.restored_tally(config, found)
    assert (restored.num_evals, restored.num_asked) == (8, 5 * 4)


def test_pacing_goes_on_with_what_was_consumed_and_the_newest_weights(config: Config) -> None:
    before = StalenessState(consumed=40, training=8, histogram={0: 30, 1: 18})
    state = LoopState(
        num_steps=6,
        policy_version=9,
        step_of_version={8: 5, 9: 6},
        staleness=msgspec.to_builtins(before, str_keys=True),
    )
    staleness = revival.staleness_of(config, of(History(published=(Published(10, 7),)), state))
    assert (staleness.consumed, staleness.histogram) == (48, {0: 30, 1: 18})
    assert (staleness.published_step, staleness.running) == (7, 0)
    fresh = revival.staleness_of(config)
    assert (fresh.published_step, fresh.consumed) == (0, 0)


def test_each_life_but_the_first_leaves_one_row_that_says_all(
    config: Config, tmp_path: Path
) -> None:
    records = RunRecords(tmp_path, SystemClock())
    revival.tell(of(History()), records)
    assert lives_of(tmp_path) == {"num_lives": 1, "num_steps_redone": 0}
    lost = GroupId("r", 5)
    history = History(
        num_asked=7,
        steps=(StepTaken(9, (lost,)),),
        drops=(
            GroupBooked(GroupId("r", 3), "deadline: no result within 5 s"),
            GroupBooked(GroupId("r", 4), "deadline: no result within 9 s"),
        ),
    )
    revival.tell(of(history, LoopState(num_steps=9, policy_version=4)), records)
    revival.tell(of(history), records)
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
    assert lives_of(tmp_path)["num_lives"] == 3


def test_a_step_that_ends_every_trainer_is_not_done_again_for_ever(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, SystemClock())
    stuck = of(History(num_asked=7), LoopState(num_steps=9))
    revival.tell(of(History(num_asked=7), LoopState(num_steps=8)), records)
    for _ in range(2):  # who has mended it, or thinks so, has as many tries again
        for _ in range(revival.MAX_LIVES):
            revival.tell(stuck, records)
        with pytest.raises(UserError, match=r"10 trainers in a row have died at step 9; logs"):
            revival.tell(stuck, records)
    records.close()


def later_life(tmp_path: Path, history: History, state: LoopState | None = None) -> Stage:
    """A pacer that goes on from this."""
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
    """Groups of an earlier life, whose results stand on its disk."""
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


def test_what_an_earlier_life_left_counts_as_ready_running_and_dropped(tmp_path: Path) -> None:
    filed = left(ScriptedClient(), 0, 1)
    drops = (GroupBooked(earlier(3), "deadline: no result within 5 s"),)
    history = History(results=filed, open_asks=(open_ask(2),), drops=drops, num_asked=4)
    stage = later_life(tmp_path, history)
    # Three of four groups are under way: what the bound leaves is one.
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 1
    assert (stage.lost(), stage.tally.num_open, stage.tally.num_dropped) == (0, 16, 4)
    assert [drop["reason"] for drop in stage.rows("drops.jsonl")] == [drops[0].reason]
    stage.records.close()


def test_what_failed_in_earlier_lives_is_no_sign_that_nothing_trains(tmp_path: Path) -> None:
    drops = tuple(GroupBooked(earlier(seq), "env_failed: no licence") for seq in range(400))
    stage = later_life(tmp_path, History(drops=drops, open_asks=(open_ask(400),), num_asked=401))
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
def test_no_batch_is_taken_before_all_results_of_earlier_lives_are_there(
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


def test_results_of_earlier_lives_are_no_sign_that_nothing_trains(
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


def test_a_step_is_done_again_with_its_own_groups(tmp_path: Path) -> None:
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
    # The third, which no step took, arrives as any other.
    stage.client.hand_out(1)
    stage.pacer.collect(0.0)
    assert stage.pacer.pacing.ready == 4
    stage.records.close()


def test_a_result_that_cannot_be_read_again_is_dropped_and_its_step_done_without(
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


def test_what_had_left_before_does_not_leave_again(tmp_path: Path) -> None:
    state = LoopState(num_steps=1, ended={"before": [(0, 5)]}, num_tasks=5)
    stage = later_life(tmp_path, History(num_asked=5, num_drawn=6), state)
    assert stage.pacer.lifecycle.num_gone == 5
    stage.pacer.ask(MANY)
    assert stage.pacer.requester.num_drawn == 6 + 4
    stage.records.close()


def test_an_evaluation_goes_on_where_an_earlier_life_left_it(tmp_path: Path) -> None:
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
