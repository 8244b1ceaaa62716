"""Text comes in whole characters, and its pieces join to the text of all ids."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollmesh.engine.embedded.text import TextTail, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


def test_half_a_character_waits_for_its_rest(tokenizer: Tokenizer) -> None:
    text = "a\N{EURO SIGN}b\N{SNOWMAN}"
    ids = tokenizer.encode(text).ids
    assert len(ids) == 8
    tail = TextTail(tokenizer, skips_special=True)
    pieces = [tail.feed([token], is_last=False) for token in ids]
    assert pieces == ["a", "", "", "\N{EURO SIGN}", "b", "", "", "\N{SNOWMAN}"]
    assert tail.text == text


def test_the_last_piece_holds_nothing_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\N{EURO SIGN}").ids[:2]
    tail = TextTail(tokenizer, skips_special=True)
    assert tail.feed(ids, is_last=True) == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<end>b").ids
    assert TextTail(tokenizer, skips_special=True).feed(ids, is_last=True) == "ab"
    assert TextTail(tokenizer, skips_special=False).feed(ids, is_last=True) == "a<end>b"


def test_a_folder_without_tokenizer_has_no_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert load_tokenizer(tmp_path) is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path) is not None
