"""Token pieces add up to the text, one per id."""

from pathlib import Path

import pytest

from rollmesh.dashboard.tokens import TokenText
from rollmesh.testing.run_folder import byte_tokenizer


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


def test_a_character_of_several_tokens_stands_at_its_last(folder: Path) -> None:
    ids = byte_tokenizer().encode("a\u00e9\u4e2db").ids
    assert TokenText([folder]).pieces(ids) == ["a", "", "\u00e9", "", "", "\u4e2d", "b"]


def test_an_id_outside_the_vocabulary_does_not_end_the_text(folder: Path) -> None:
    ids = byte_tokenizer().encode("ab").ids
    pieces = TokenText([folder]).pieces([ids[0], 999_999, ids[1]])
    assert "".join(pieces) == "ab"


def test_the_first_folder_with_a_tokenizer_counts(folder: Path, tmp_path: Path) -> None:
    assert TokenText([tmp_path / "none", folder]).pieces([0]) != ["<0>"]


def test_without_a_tokenizer_the_ids_are_shown(tmp_path: Path) -> None:
    assert TokenText([tmp_path / "none"]).pieces([5, 6]) == ["<5>", "<6>"]


def test_a_broken_tokenizer_shows_the_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert TokenText([tmp_path]).pieces([5]) == ["<5>"]
