"""Trajectories are found by id, and token ids are shown as text."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rollmesh.dashboard.trajectories import TokenText, TrajectoryIndex, search_backwards
from rollmesh.testing.run_folder import FakeRun, byte_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "demo")


def path_of(run: FakeRun) -> Path:
    return run.folder / "trajectories.jsonl"


def test_recent_trajectories_come_newest_first(run: FakeRun) -> None:
    ids = [run.add_rollout() for _ in range(5)]
    shelf = TrajectoryIndex(path_of(run))
    assert [summary.rollout_id for summary in shelf.read()] == ids
    assert [summary.rollout_id for summary in shelf.recent(2)] == [ids[4], ids[3]]


def test_an_indexed_trajectory_is_read_from_its_place(run: FakeRun) -> None:
    ids = [run.add_rollout(step=number) for number in range(3)]
    shelf = TrajectoryIndex(path_of(run))
    shelf.read()
    row = shelf.load(ids[1])
    assert row is not None
    assert (row.rollout_id, row.step) == (ids[1], 1)
    assert row.messages[0]["role"] == "user"
    assert len(row.samples[0].token_ids) == len(row.samples[0].logprobs)


def test_a_trajectory_evicted_from_the_index_is_still_found(run: FakeRun) -> None:
    ids = [run.add_rollout() for _ in range(30)]
    shelf = TrajectoryIndex(path_of(run), max_entries=4)
    shelf.read()
    assert len(shelf.recent(100)) == 4
    row = shelf.load(ids[0])
    assert row is not None
    assert row.rollout_id == ids[0]


@pytest.mark.parametrize("block_bytes", [1, 7, 100, 4096, 10**6])
def test_the_search_finds_lines_across_block_borders(run: FakeRun, block_bytes: int) -> None:
    ids = [run.add_rollout() for _ in range(3)]
    for rollout_id in ids:
        row = search_backwards(path_of(run), rollout_id, block_bytes)
        assert row is not None
        assert row.rollout_id == rollout_id


def test_an_id_that_only_a_message_mentions_is_not_found(run: FakeRun) -> None:
    run.add_rollout(messages=[{"role": "user", "content": "r9/9/9", "name": "r9/9/9"}])
    shelf = TrajectoryIndex(path_of(run))
    assert shelf.load("r9/9/9") is None


def test_the_latest_line_of_an_id_is_used(run: FakeRun) -> None:
    run.add_rollout(step=1)
    run.num_rollouts = 0
    rollout_id = run.add_rollout(step=2)
    shelf = TrajectoryIndex(path_of(run))
    shelf.read()
    assert [summary.step for summary in shelf.recent(5)] == [2]
    row = search_backwards(path_of(run), rollout_id)
    assert row is not None
    assert row.step == 2


def test_a_bad_line_is_counted_and_a_missing_file_is_empty(run: FakeRun) -> None:
    shelf = TrajectoryIndex(path_of(run))
    assert shelf.read() == []
    assert shelf.load("r0/0/0") is None
    run.append("trajectories.jsonl", {"rollout_id": 3})
    assert shelf.read() == []
    assert shelf.num_bad_lines == 1


def test_a_replaced_file_empties_the_index(run: FakeRun) -> None:
    run.add_rollout()
    shelf = TrajectoryIndex(path_of(run))
    shelf.read()
    path_of(run).rename(run.folder / "aside")
    run.num_rollouts = 100
    new_id = run.add_rollout()
    shelf.read()
    assert [summary.rollout_id for summary in shelf.recent(10)] == [new_id]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_pieces_are_one_per_id_and_join_to_the_text(folder: Path) -> None:
    text = "<|im_start|>user\n  two  spaces<|im_end|>"
    ids = byte_tokenizer().encode(text).ids
    pieces = TokenText([folder]).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert pieces[0] == "<|im_start|>"


def test_a_character_of_several_tokens_is_at_its_last(folder: Path) -> None:
    ids = byte_tokenizer().encode("a\u00e9\u4e2db").ids
    assert TokenText([folder]).pieces(ids) == ["a", "", "\u00e9", "", "", "\u4e2d", "b"]


def test_an_id_outside_the_vocabulary_does_not_end_the_text(folder: Path) -> None:
    ids = byte_tokenizer().encode("ab").ids
    pieces = TokenText([folder]).pieces([ids[0], 999_999, ids[1]])
    assert "".join(pieces) == "ab"


def test_the_first_folder_with_a_tokenizer_is_used(folder: Path, tmp_path: Path) -> None:
    assert TokenText([tmp_path / "none", folder]).pieces([0]) != ["<0>"]


def test_without_a_tokenizer_the_ids_are_shown(tmp_path: Path) -> None:
    assert TokenText([tmp_path / "none"]).pieces([5, 6]) == ["<5>", "<6>"]


def test_a_broken_tokenizer_is_logged_and_the_ids_are_shown(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with capture_logs() as logged:
        assert TokenText([tmp_path]).pieces([5]) == ["<5>"]
    assert [each["event"] for each in logged] == ["tokenizer.not_loaded"]
