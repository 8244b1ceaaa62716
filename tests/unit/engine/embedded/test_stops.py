"""Stop strings: found with the token that completes them, and not told before they are decided."""

import re

from tokenizers import Tokenizer

from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import Finish
from rollmesh.engine.embedded.stops import StopRule
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt


def matched_at(
    tokenizer: Tokenizer, text: str, *strings: str, pattern: str | None = None
) -> tuple[int, str] | None:
    """How many tokens of `text` were fed before something matched, and what."""
    patterns = () if pattern is None else (re.compile(pattern),)
    watch = StopRule(tokenizer, strings, patterns).begin()
    for at, token in enumerate(tokenizer.encode(text).ids, 1):
        if (matched := watch.feed(token)) is not None:
            return at, matched
    return None


def test_a_stop_string_is_found_with_the_token_that_completes_it(letters: Tokenizer) -> None:
    assert matched_at(letters, "abcabd", "abd") == (6, "abd")
    assert matched_at(letters, "abcabd", "zz", "ca") == (4, "ca")
    assert matched_at(letters, "abcabd", "abe") is None
    assert matched_at(letters, "a", "a") == (1, "a")


def test_a_pattern_is_told_by_its_own_text(letters: Tokenizer) -> None:
    assert matched_at(letters, "abccd", pattern="c+d") == (5, "c+d")
    assert matched_at(letters, "abcc", pattern="d") is None


def test_it_is_undecided_while_the_text_may_become_a_stop_string(letters: Tokenizer) -> None:
    watch = StopRule(letters, ("bcd",)).begin()
    undecided = []
    for token in letters.encode("abcbca").ids:
        assert watch.feed(token) is None
        undecided.append(watch.is_undecided)
    assert undecided == [False, True, True, True, True, False]


def test_a_stop_string_ends_it_and_is_not_told_before(model: Model, letters: Tokenizer) -> None:
    prompt = random_prompt(9)
    free = ask(prompt, new=12, seed=2)
    finish_all(make_engine(model), free)
    stop = letters.decode(output(free)[4:7])
    rule = StopRule(letters, (stop,))
    request = ask(prompt, new=12, seed=2, stop=rule, streams=True)
    progress = finish_all(make_engine(model), request)
    assert output(request) == output(free)[:7]
    assert progress[-1].finish == Finish("stop", matched=stop)
    counts = [each.num_output_tokens for each in progress]
    assert counts == [1, 2, 3, 4, 7], "while it may become the stop string it is not told"
