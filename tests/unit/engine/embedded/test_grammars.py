"""Grammars: the allowed next tokens are exactly those that the grammar permits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from rollmesh.engine.embedded.engine import PauseMode
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import FinishReason, Request
from rollmesh.engine.embedded.shaping import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    GrammarRefused,
    Shaping,
)
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt
from tests.unit.engine.embedded.references import Reference
from tests.unit.engine.embedded.tiny_models import EOS, VOCAB_SIZE

ENDS: dict[str, Any] = {"stop_token_ids": frozenset({EOS})}


@pytest.fixture
def compiler(letters: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(letters, VOCAB_SIZE, [EOS])


def allowed(matcher: GrammarMatcher, letters: Tokenizer) -> set[str]:
    """Texts of the allowed next tokens; the end token is ''."""
    ids = matcher.allowed_V().nonzero()[0].tolist()
    return {"" if token == EOS else letters.decode([token]) for token in ids}


def take(matcher: GrammarMatcher, letters: Tokenizer, text: str) -> None:
    for token in letters.encode(text).ids:
        assert matcher.allowed_V()[token]
        matcher.take(token)


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    matcher = compiler.compile("regex", "[ab]{2}c?").start()
    seen = [allowed(matcher, letters)]
    for text in "abc":
        take(matcher, letters, text)
        seen.append(allowed(matcher, letters))
    assert seen == [{"a", "b"}, {"a", "b"}, {"c", ""}, {""}]
    matcher.take(EOS)
    assert allowed(matcher, letters) == {""}, "with ends ignored, a complete output stays complete"


def test_matchers_of_one_grammar_are_independent(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    grammar = compiler.compile("ebnf", 'root ::= "a" item | "b"\nitem ::= "c" | "d"')
    first, second = grammar.start(), grammar.start()
    take(first, letters, "a")
    assert allowed(first, letters) == {"c", "d"}
    assert allowed(second, letters) == {"a", "b"}


def test_a_schema_allows_its_objects_and_no_others(
    compiler: GrammarCompiler, letters: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    matcher = compiler.compile("json_schema", json.dumps(schema)).start()
    take(matcher, letters, '{"a":"b"')
    assert "}" in allowed(matcher, letters)
    assert "" not in allowed(matcher, letters)
    take(matcher, letters, "}")
    assert "" in allowed(matcher, letters)
    assert "," not in allowed(matcher, letters)


def test_a_token_that_the_grammar_cannot_take_ends_the_output_and_not_the_engine(
    model: Model, letters: Tokenizer
) -> None:
    marked = Tokenizer.from_str(letters.to_str())
    marked.add_special_tokens(["<end>"])  # its text is in the grammar
    grammar = GrammarCompiler(marked, VOCAB_SIZE, [0]).compile("ebnf", 'root ::= "<end>" "a"')
    bias = Shaping(bias_tokens=(EOS,), biases=(100.0,))
    request = ask([1, 2], new=9, grammar=grammar, shaping=bias)
    progress = finish_all(make_engine(model), request)
    assert progress[-1].finish == FinishReason(
        "abort", message=f"token {EOS} is not in the grammar"
    )
    assert output(request) == [EOS]


def test_a_grammar_may_contain_an_added_token(model: Model, letters: Tokenizer) -> None:
    marked = Tokenizer.from_str(letters.to_str())
    marked.add_tokens(["<end>"])  # added and not special, as <tool_call> is
    grammar = GrammarCompiler(marked, VOCAB_SIZE, [0]).compile("ebnf", 'root ::= "<end>" "a"')
    request = ask([1, 2], new=9, grammar=grammar, stop_token_ids=frozenset({0}))
    finish_all(make_engine(model), request)
    assert letters.decode(output(request)[:-1]) == "<end>a"


def test_a_text_that_is_no_grammar_is_refused_each_time(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="Failed to compile regex grammar"):
            compiler.compile("regex", "(((")


def test_recent_grammars_are_cached_and_old_ones_dropped(compiler: GrammarCompiler) -> None:
    def compiled(number: int) -> CompiledGrammar:
        return compiler.compile("regex", f"a{{{number}}}")

    first = compiled(1)
    assert compiled(1) is first
    for number in range(2, 80):
        compiled(number)
    assert compiled(1) is not first, "the cache is bounded"


def text_of(letters: Tokenizer, request: Request) -> str:
    return letters.decode([token for token in output(request) if token != EOS])


def test_a_grammar_binds_its_rows_only_also_across_a_retraction(
    model: Model, letters: Tokenizer
) -> None:
    grammar = GrammarCompiler(letters, VOCAB_SIZE, [EOS]).compile("regex", "(a[bc]){3,9}d")
    bound = [
        ask(random_prompt(9, at), f"bound-{at}", new=40, seed=at, grammar=grammar, **ENDS)
        for at in range(6)
    ]
    free = [ask(random_prompt(9, at), f"free-{at}", new=12, seed=at) for at in range(6)]
    engine = make_engine(model)
    for pair in zip(bound, free, strict=True):
        for request in pair:
            engine.submit(request)
        engine.step()
    engine.pause(PauseMode.RETRACT)
    engine.resume()
    finish_all(engine)
    texts = [text_of(letters, request) for request in bound]
    assert all(re.fullmatch("(a[bc]){3,9}d", text) for text in texts)
    assert len(set(texts)) > 1
    assert [request.num_retractions for request in bound] == [1] * 6
    alone = ask(random_prompt(9, 3), "alone", new=12, seed=3)
    finish_all(make_engine(model), alone)
    assert output(free[3]) == output(alone), "grammars of other rows do not change a free row"


def test_logprobs_under_a_grammar_are_normalised_over_the_allowed_tokens(
    model: Model, folder: Path, letters: Tokenizer
) -> None:
    grammar = GrammarCompiler(letters, VOCAB_SIZE, [EOS]).compile("regex", "[abc]d")
    prompt = random_prompt(9)
    request = ask(prompt, new=3, seed=1, temperature=0.5, grammar=grammar, num_top=4, **ENDS)
    finish_all(make_engine(model), request)
    first, second, end = output(request)
    abc = letters.encode("abc").ids
    logits_TV = Reference(folder).logits([*prompt, first, second])
    expected = (logits_TV[len(prompt) - 1, abc] / 0.5).log_softmax(-1)
    assert request.logprobs[0] == pytest.approx(expected[abc.index(first)].item(), abs=1e-4)
    assert request.logprobs[1:] == [0.0, 0.0], "only one token was allowed"
    assert end == EOS
    top_logprobs = {token: logprob for logprob, token in request.tops[0]}
    assert [top_logprobs[token] for token in abc] == pytest.approx(expected.tolist(), abs=1e-4)
    impossible = torch.finfo(torch.float32).min
    assert min(top_logprobs.values()) == impossible
