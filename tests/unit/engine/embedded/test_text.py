"""Detokenization piece by piece, and stop strings in growing text."""

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import FinishReason
from rollmesh.engine.embedded.text import IncrementalDecoder, StopRule, load_tokenizer
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt


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
    tail = IncrementalDecoder(tokenizer, skip_special=True)
    pieces = [tail.feed([token], is_last=False) for token in ids]
    assert pieces == ["a", "", "", "\N{EURO SIGN}", "b", "", "", "\N{SNOWMAN}"]
    assert tail.text == text


def test_the_last_piece_holds_back_no_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\N{EURO SIGN}").ids[:2]
    tail = IncrementalDecoder(tokenizer, skip_special=True)
    assert tail.feed(ids, is_last=True) == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<end>b").ids
    assert IncrementalDecoder(tokenizer, skip_special=True).feed(ids, is_last=True) == "ab"
    assert IncrementalDecoder(tokenizer, skip_special=False).feed(ids, is_last=True) == "a<end>b"


def test_a_folder_without_tokenizer_has_no_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert load_tokenizer(tmp_path) is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path) is not None


def matched_at(
    tokenizer: Tokenizer, text: str, *strings: str, pattern: str | None = None
) -> tuple[int, str] | None:
    """Feed `text`; return the number of tokens up to a match, and the match."""
    patterns = () if pattern is None else (re.compile(pattern),)
    watch = StopRule(tokenizer, strings, patterns).start()
    for at, token in enumerate(tokenizer.encode(text).ids, 1):
        if (matched := watch.feed(token)) is not None:
            return at, matched
    return None


def test_a_stop_string_is_found_with_the_token_that_completes_it(letters: Tokenizer) -> None:
    assert matched_at(letters, "abcabd", "abd") == (6, "abd")
    assert matched_at(letters, "abcabd", "zz", "ca") == (4, "ca")
    assert matched_at(letters, "abcabd", "abe") is None
    assert matched_at(letters, "a", "a") == (1, "a")


def test_a_pattern_match_is_reported_by_the_pattern(letters: Tokenizer) -> None:
    assert matched_at(letters, "abccd", pattern="c+d") == (5, "c+d")
    assert matched_at(letters, "abcc", pattern="d") is None


def test_a_stop_rule_is_undecided_while_the_text_may_become_a_stop_string(
    letters: Tokenizer,
) -> None:
    watch = StopRule(letters, ("bcd",)).start()
    undecided = []
    for token in letters.encode("abcbca").ids:
        assert watch.feed(token) is None
        undecided.append(watch.is_undecided)
    assert undecided == [False, True, True, True, True, False]


def test_a_stop_string_ends_a_request_and_is_not_reported_before(
    model: Model, letters: Tokenizer
) -> None:
    prompt = random_prompt(9)
    free = ask(prompt, new=12, seed=2)
    finish_all(make_engine(model), free)
    stop = letters.decode(output(free)[4:7])
    rule = StopRule(letters, (stop,))
    request = ask(prompt, new=12, seed=2, stop=rule, streams=True)
    progress = finish_all(make_engine(model), request)
    assert output(request) == output(free)[:7]
    assert progress[-1].finish == FinishReason("stop", matched=stop)
    counts = [each.num_output_tokens for each in progress]
    assert counts == [1, 2, 3, 4, 7], "an undecided text is not reported"
