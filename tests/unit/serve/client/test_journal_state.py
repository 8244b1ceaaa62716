"""A trainer's journal yields one consistent history at whatever byte a kill cuts it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.journal import Journal
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.client.journal import open_journal
from rollmesh.serve.client.journal_entries import (
    Again,
    AnyEntry,
    EndedSoFar,
    GroupAsked,
    GroupBooked,
    Groups,
    Published,
    RunBegan,
    StateSaved,
    StepTaken,
    decode_entry,
)
from rollmesh.serve.client.journal_state import JournalPosition, JournalState
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan, plan_recovery
from rollmesh.wire.frames import Packet, encode_ask
from rollmesh.wire.messages import GroupAsk, GroupFinished
from tests.unit.serve.client.trainer_process import CONFIG, Trainer

NUM_SEGMENTS = 20
"""Maximum of segments of a journal that checkpoints free."""
ACTS = (
    "ask",
    "ask",
    "ask",
    "keep",
    "keep",
    "fail",
    "drop",
    "try",
    "step",
    "part",
    "publish",
    "save",
    "copy",
    "tell",
    "restart",
)
acts = st.tuples(st.sampled_from(ACTS), st.integers(0, 7))


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def check(plan: RecoveryPlan, trainer: Trainer) -> None:
    """Assert that every open group is in exactly one place and that no ended group is named."""
    in_steps = [group_id for step in plan.redo for group_id in step.group_ids]
    ready = [each.group_id for each in plan.ready]
    dropped = [each.group_id for each in plan.drops]
    is_open = [each.group_id for each in plan.open_asks]
    parted = [each.group_id for each in plan.parted]
    places = [*in_steps, *ready, *parted, *dropped, *is_open]
    assert len(set(places)) == len(places), "a group is in two places"
    assert set(plan.results) == {*in_steps, *parted}
    assert all(trainer.trained[step.step] == step.group_ids for step in plan.redo)
    assert [step.step for step in plan.redo] == list(range(plan.num_steps, plan.next_step))
    assert plan.lines == ()


def in_fixed_order(plan: RecoveryPlan) -> RecoveryPlan:
    """Return the plan with sorted requests, because they are rewritten now and then."""
    return msgspec.structs.replace(plan, open_asks=tuple(sorted(plan.open_asks, key=str)))


@settings(max_examples=50, deadline=None)
@given(before=st.lists(acts, max_size=50), last=acts, data=st.data())
def test_a_kill_at_any_byte_leaves_the_history_before_or_after_the_operation(
    before: list[tuple[str, int]], last: tuple[str, int], data: st.DataObject
) -> None:
    with scratch() as folder:
        trainer = Trainer(folder / "run")
        for act in before:
            trainer.do(*act)
        if last[0] == "save":
            trainer.make_checkpoint()  # durable, but not yet reported
        plans = [plan_now(trainer)]
        shutil.copytree(folder / "run", folder / "killed")
        if last[0] == "save":
            trainer.report_checkpoint()
        else:
            trainer.do(*last)
        plans.append(plan_now(trainer))
        cut(folder, data)
        client_journal = open_journal(folder / "killed", CONFIG)
        plan = in_fixed_order(plan_recovery(trainer.saved, client_journal.history()))
        client_journal.close()
        trainer.client_journal.close()
    check(plan, trainer)
    assert plan in plans


def plan_now(trainer: Trainer) -> RecoveryPlan:
    return in_fixed_order(plan_recovery(trainer.saved, trainer.client_journal.history()))


def cut(folder: Path, data: st.DataObject) -> None:
    """Give the folder `killed` all bytes up to some byte of the last operation."""
    old = {path.name: path for path in (folder / "killed/journal").glob("*.journal")}
    new = sorted((folder / "run/journal").glob("*.journal"))
    first = end_of(sorted(old.values())[-1])
    at = data.draw(st.integers(first, max(first, end_of(new[-1]))), label="killed at")
    for path in new:
        start = int(path.stem)
        if start <= at:
            (folder / "killed/journal" / path.name).write_bytes(path.read_bytes()[: at - start])


def end_of(segment: Path) -> int:
    return int(segment.stem) + segment.stat().st_size


@settings(max_examples=40, deadline=None)
@given(done=st.lists(acts, max_size=60))
def test_a_restarted_process_has_the_history_of_the_last_one(done: list[tuple[str, int]]) -> None:
    with scratch() as folder:
        trainer = Trainer(folder)
        for act in done:
            trainer.do(*act)
        known, ended = trainer.client_journal.history(), trainer.client_journal.ended
        trainer.client_journal.close()
        client_journal = open_journal(folder, CONFIG)
        assert client_journal.history() == known
        assert {run: each.intervals() for run, each in client_journal.ended.items()} == {
            run: each.intervals() for run, each in ended.items()
        }
        plan = plan_recovery(trainer.saved, known)
        check(plan, trainer)
        assert [each.group_id for each in plan.ready] == trainer.ready
        assert {each.group_id for each in plan.open_asks} == set(trainer.open)
        assert plan.next_step == trainer.num_steps
        assert plan.policy_version == trainer.policy_version + 1
        assert plan.step_of_version == trainer.step_of_version
        assert plan.num_tasks == trainer.num_asked
        assert ids_in(plan.evals) == trainer.evals
        to_come = {*trainer.open, *trainer.ready} & trainer.again.keys()
        assert {each: plan.again[each] for each in to_come} == {
            each: trainer.again[each] for each in to_come
        }
        to_ask = {each.again.group_id for each in plan.waiting}
        to_ask |= {each.group_id for each in plan.parted if each.times}
        assert to_ask == {each.group_id for each in trainer.waiting}
        client_journal.close()


def ids_in(groups: Groups) -> set[GroupId]:
    return {
        GroupId(run_id, seq)
        for run_id, intervals in groups.items()
        for interval in intervals
        for seq in range(*interval)
    }


def test_checkpoints_keep_the_journal_small_however_long_the_run(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.do("ask", 0)  # this request stays open to the end
    for _ in range(200):
        for act in ("ask", "ask"):
            trainer.do(act, 1)
        trainer.do("keep", 1)
        trainer.do("fail" if trainer.num_steps % 7 == 0 else "keep", 1)
        for act in ("step", "publish", "save"):
            trainer.do(act, 0)
        assert trainer.client_journal.size_bytes < NUM_SEGMENTS * CONFIG.segment_bytes
    [still_open] = trainer.client_journal.reopened()
    assert still_open.group_id == GroupId("r1", 0)
    trainer.client_journal.close()


def test_results_used_by_steps_are_not_handed_out_but_can_be_read(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for act in ("ask", "ask", "ask", "keep", "keep", "keep", "step"):
        trainer.do(act, 0)
    trainer.client_journal.close()
    client_journal = open_journal(tmp_path, CONFIG)
    plan = plan_recovery(None, client_journal.history())
    handed_out = client_journal.begin(RunBegan("r9"), plan.saved)
    assert [each.group_id for each in handed_out] == trainer.ready
    for group_id in trainer.trained[0]:
        assert client_journal.load(plan.results[group_id]).group_id == group_id
    client_journal.close()


def test_ends_without_a_result_are_in_the_history_with_their_reasons(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for act in ("ask", "ask", "fail", "drop"):
        trainer.do(act, 0)
    trainer.client_journal.close()
    client_journal = open_journal(tmp_path, CONFIG)
    reasons = [each.reason for each in client_journal.history().drops]
    assert reasons == ["infra_error: no GPU", "deadline: over"]
    client_journal.close()


def test_journal_is_full_only_while_a_checkpoint_would_free_some_of_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    while trainer.client_journal.size_bytes <= CONFIG.max_bytes:
        trainer.do("ask", 0)
        trainer.do("keep", 0)
    full = [
        trainer.client_journal.is_full
    ]  # all results wait for their step, for which more may be requested
    trainer.do("step", 0)
    full.append(trainer.client_journal.is_full)
    trainer.do("save", 0)
    full.append(trainer.client_journal.is_full)
    assert full == [False, True, False]
    trainer.client_journal.close()


@pytest.mark.parametrize("num_segments", [1, 3])
def test_ends_that_the_journal_has_lost_are_taken_from_the_checkpoint(
    tmp_path: Path, num_segments: int
) -> None:
    """The segments are gone as if a full disk had kept their summary from being written."""
    trainer = Trainer(tmp_path)
    for _ in range(20):
        for act in ("ask", "keep", "step"):
            trainer.do(act, 0)
    trainer.make_checkpoint()
    trainer.client_journal.close()
    for path in sorted((tmp_path / "journal").glob("*.journal"))[:num_segments]:
        path.unlink()
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(
        RunBegan("r2"), plan_recovery(trainer.saved, client_journal.history()).saved
    )
    assert client_journal.ended["r1"].intervals() == [(0, 20)]
    client_journal.close()


def test_entries_of_older_journals_are_read() -> None:
    older: list[tuple[list[object], AnyEntry]] = [
        (["run_began", "r1"], RunBegan("r1")),
        (
            ["group_asked", ["r1", 3], "guess", 4, 0, 0.0, 9.0],
            GroupAsked(GroupId("r1", 3), "guess", 4, 0, 0.0, 9.0),
        ),
        (["ended_so_far", {"r1": [[0, 7]]}], EndedSoFar({"r1": [(0, 7)]})),
    ]
    for written, meant in older:
        assert decode_entry([msgspec.msgpack.encode(written)]) == meant
    journal_state = JournalState()
    for at, (_, meant) in enumerate(older):
        journal_state.replay(meant, JournalPosition(at, 0))
    assert (journal_state.num_asked, journal_state.ended["r1"].intervals()) == ({"r1": 7}, [(0, 7)])


@pytest.mark.parametrize("num_steps", [4, 9])
def test_an_older_checkpoint_does_not_replace_a_newer_one(num_steps: int) -> None:
    journal_state = JournalState()
    newer, older = StateSaved(9, 9, {"r1": [(0, 30)]}), StateSaved(num_steps, 4, {"r1": [(0, 12)]})
    for at, entry in enumerate((newer, older)):
        journal_state.replay(entry, JournalPosition(at, 0))
    assert journal_state.saved == newer
    assert journal_state.ended["r1"].intervals() == [(0, 30)]


def test_journals_without_checkpoints_retain_no_drops_and_steps(tmp_path: Path) -> None:
    client_journal = open_journal(tmp_path, CONFIG)
    client_journal.begin(RunBegan("r1"), None)
    client_journal.ended["r1"].add(0)
    client_journal.drop(GroupId("r1", 0), "deadline: over")
    client_journal.note(StepTaken(0, ()))
    client_journal.note(Published(1, 0))
    assert (
        client_journal.history().drops,
        client_journal.history().steps,
        client_journal.history().published,
    ) == ((), (), ())
    client_journal.close()
    journal = Journal(tmp_path / "journal", 600)
    kinds = [type(decode_entry(frames)) for _, frames in journal.replay()]
    assert kinds == [RunBegan, GroupBooked, StepTaken, Published]
    journal.close()


def test_versions_published_after_the_checkpoint_was_copied_stay(tmp_path: Path) -> None:
    client_journal = open_journal(
        tmp_path, JournalConfig(segment_bytes=1)
    )  # each record has its own segment
    client_journal.begin(RunBegan("r1"), StateSaved())
    client_journal.note(Published(1, 0))
    client_journal.note(Published(2, 1))
    client_journal.cover(StateSaved(1, 1, {}))
    client_journal.cover(
        StateSaved(2, 2, {})
    )  # The newest may become damaged, so the one before it frees segments.
    client_journal.close()
    again = open_journal(tmp_path, CONFIG)
    assert again.history().published == (Published(2, 1),)
    assert plan_recovery(None, again.history()).policy_version == 3
    again.close()


def test_the_origin_of_a_repeated_request_is_known_until_its_group_has_left(tmp_path: Path) -> None:
    client_journal = open_journal(
        tmp_path, JournalConfig(segment_bytes=1)
    )  # each record has its own segment
    client_journal.begin(RunBegan("r1"), StateSaved())
    again = Again(GroupId("r1", 4), 2)
    body = encode_ask(GroupAsk(task=Task(id="t"), sampling=SamplingPolicy(), seed=0))
    asked = Asked(group_id=GroupId("r1", 7), env="guess", num_samples=4, again=again, body=body)
    client_journal.ask(asked)
    finished = GroupFinished(asked.group_id, 1, "w1", True)
    client_journal.keep(finished, Packet(finished, "", b"body", ()))
    before, after = StateSaved(1, 1, {"r1": [(0, 7)]}), StateSaved(2, 2, {"r1": [(0, 8)]})
    for saved, known in ((before, {asked.group_id: again}), (after, {})):
        for _ in range(2):
            client_journal.cover(saved)
        client_journal.close()
        client_journal = open_journal(tmp_path, CONFIG)
        assert client_journal.history().again == known
    client_journal.close()


def test_results_that_no_step_will_use_require_a_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    while trainer.client_journal.size_bytes <= CONFIG.max_bytes:
        trainer.do("ask", 0)
        trainer.do("keep", 0)
    full = [trainer.client_journal.is_full]
    stale = trainer.ready.pop()
    trainer.client_journal.take((stale,))
    full.append(trainer.client_journal.is_full)
    assert full == [False, True]
    # Until a checkpoint covers its removal, a restarted client gets it again.
    assert stale in [each.group_id for each in trainer.client_journal.history().results]
    trainer.client_journal.close()


def trainer_with_a_broken_newest_checkpoint(folder: Path, config: JournalConfig) -> Trainer:
    trainer = Trainer(folder, config)
    for _ in range(3):
        before = trainer.saved
        for act in ("ask", "ask", "keep", "keep", "step", "publish", "save"):
            trainer.do(act, 0)
    for act in ("ask", "keep"):  # generated by the version that only the damaged checkpoint has
        trainer.do(act, 0)
    trainer.saved = before
    return trainer


def test_nothing_is_lost_when_the_newest_checkpoint_is_broken(tmp_path: Path) -> None:
    trainer = trainer_with_a_broken_newest_checkpoint(tmp_path, CONFIG)
    for _ in range(2):
        trainer.do("restart", 0)
        check(trainer.plan, trainer)
        assert [each.step for each in trainer.plan.redo] == [2]
        assert [each.group_id for each in trainer.plan.ready] == trainer.ready
        assert trainer.plan.step_of_version == {0: 0, 1: 1, 2: 2, 3: 3}
    # The checkpoint before it freed segments all the same.
    assert trainer.client_journal.history().saved.num_steps == 2
    trainer.client_journal.close()


def test_versions_of_results_are_known_when_the_broken_checkpoint_had_freed_segments(
    tmp_path: Path,
) -> None:
    tight = msgspec.structs.replace(CONFIG, max_bytes=1)
    trainer = trainer_with_a_broken_newest_checkpoint(tmp_path, tight)
    for _ in range(2):
        trainer.do("restart", 0)
        [line] = trainer.plan.lines
        assert line.startswith("steps 2 to 2 are not in the weights: the checkpoint that freed")
        assert (trainer.plan.num_steps, trainer.plan.next_step) == (2, 3)
        assert [each.group_id for each in trainer.plan.ready] == trainer.ready
        assert trainer.plan.step_of_version == {0: 0, 1: 1, 2: 2, 3: 3}
    assert trainer.client_journal.history().published == ()
    trainer.client_journal.close()
