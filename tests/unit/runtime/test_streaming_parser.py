"""Replies are parsed as they arrive, with equal results however they are split."""

import json
from collections.abc import Iterable, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.chat import Delta, DeltaReader, ParsedReply, ParseOptions, ToolCall
from rollmesh.runtime.tokens.families import Family, Parser
from rollmesh.runtime.tokens.parsers import Marks, StreamingParser
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import CallStyle

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "}\\"\xe9"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=f>\n<parameter=s>\n  one\ntwo\n</parameter>\n"
    "<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>"
)
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
            },
        }
    ]
).encode()
END = "<|im_end|>"
PIECES = [
    *("hello", " world", "\n", " ", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *(CALL, XML, '{"name": "f"', "}", '"', "<function=g>", "</parameter>", "Obs", "ervation:"),
    *("\xe9", "\xe9 cut in two", END),
]


class Fold:
    """The pieces that a client receives, with assertions about their order."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.num_tokens = 0

    def add(self, delta: Delta, is_last: bool = False) -> None:
        assert delta.num_tokens >= self.num_tokens
        self.num_tokens = delta.num_tokens
        assert not (delta.content and self.calls and not is_last), "content after a call"
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(self.calls):
                assert call.id
                assert call.name
                self.calls.append(ToolCall(call.id, call.name, call.arguments))
            else:
                assert (call.id, call.name) == ("", "")
                assert call.index == len(self.calls) - 1, "a call continues after the next one"
                before = self.calls[-1]
                text = before.arguments + call.arguments
                self.calls[-1] = ToolCall(before.id, before.name, text)

    def answer(self) -> ParsedReply:
        return ParsedReply(self.content, self.reasoning, tuple(self.calls))


def read(reader: DeltaReader, ids: Sequence[int], sizes: Iterable[int]) -> ParsedReply:
    fold, at = Fold(), 0
    for size in [*sizes, len(ids)]:
        delta = reader.feed(ids[at : at + size])
        at += size
        if delta is not None:
            assert delta.content or delta.reasoning or delta.calls
            fold.add(delta)
    fold.add(reader.end(len(ids)), is_last=True)
    assert fold.num_tokens == len(ids)
    assert fold.answer() == reader.answer()
    return fold.answer()


def marks_of(tokenizer: Tokenizer, style: CallStyle, opens: bool = False) -> Marks:
    convert = tokenizer.convert_tokens_to_ids
    return Marks(
        convert("<think>"),
        convert("</think>"),
        convert("<tool_call>"),
        convert("</tool_call>"),
        frozenset([convert(END)]),
        opens,
        style,
    )


def encoded(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        own = tokenizer.encode(piece)
        ids += own[:1] if piece.endswith("in two") else own
    return ids


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=9),
    sizes=st.lists(st.integers(1, 5), max_size=60),
    reads_calls=st.booleans(),
    opens=st.booleans(),
    style=st.sampled_from(CallStyle),
    stop=st.sampled_from([(), ("Observation:",), ("}", "hello w")]),
)
def test_a_reply_is_parsed_equally_however_it_is_split(
    tokenizer: Tokenizer,
    pieces: list[str],
    sizes: list[int],
    reads_calls: bool,
    opens: bool,
    style: CallStyle,
    stop: tuple[str, ...],
) -> None:
    ids = encoded(tokenizer, pieces)
    marks = marks_of(tokenizer, style, opens)
    marks = marks if reads_calls else marks.without_calls()
    options = ParseOptions(stop, reads_calls, tools=TOOLS)
    cut = read(StreamingParser(tokenizer, marks, options), ids, sizes)
    assert cut == read(StreamingParser(tokenizer, marks, options), ids, [])


@given(
    reasoning=st.sampled_from(["", "why", "two\n\nlines", "\xe9"]),
    content=st.sampled_from(["", "I guess 4", "a <b> c", "\xe9"]),
    calls=st.lists(
        st.dictionaries(st.sampled_from(["s", "n"]), st.integers() | st.text(max_size=9)),
        max_size=3,
    ),
    sizes=st.lists(st.integers(1, 5), max_size=60),
)
def test_a_well_formed_reply_is_parsed_as_by_the_library(
    prompts: Prompts,
    family: Family,
    tokenizer: Tokenizer,
    reasoning: str,
    content: str,
    calls: list[dict[str, object]],
    sizes: list[int],
) -> None:
    sampled = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    blocks = [json.dumps({"name": "f", "arguments": a}, ensure_ascii=False) for a in calls]
    sampled += content + "".join(f"\n<tool_call>\n{block}\n</tool_call>" for block in blocks) + END
    ids = tokenizer.encode(sampled)
    library = cast("Parser", family.renderer)
    expected = library.parse_response(ids, tools=None, prompt_ids=None)
    own = read(prompts.reader(ParseOptions((), True, "call")), ids, sizes)
    assert (own.content, own.reasoning) == (expected.content, expected.reasoning_content or "")
    assert [json.loads(call.arguments) for call in own.tool_calls] == [
        call.arguments for call in expected.tool_calls
    ]


def test_text_reasoning_and_calls_are_streamed_as_they_are_sampled(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    reader = prompts.reader(ParseOptions((), True, "c"))
    ids = tokenizer.encode(f"<think>hm, so</think>I guess{CALL}{END}")
    deltas = [delta for i in ids if (delta := reader.feed([i]))]
    assert len([1 for delta in deltas if delta.reasoning]) > 1
    assert len([1 for delta in deltas if delta.content]) > 1
    assert len([1 for delta in deltas if delta.calls]) > 5
    assert reader.end(0).calls == ()


@pytest.mark.parametrize("stop", ["Observation:", "s"])
def test_the_beginning_of_a_stop_string_is_held_back(
    prompts: Prompts, tokenizer: Tokenizer, stop: str
) -> None:
    reader = prompts.reader(ParseOptions((stop,), False))
    sent = [reader.feed([i]) for i in tokenizer.encode("go " + stop)]
    assert "".join(d.content for d in sent if d) == "go"
    missed = prompts.reader(ParseOptions(("Observation:",), False))
    sent = [missed.feed([i]) for i in tokenizer.encode("Observant")]
    assert "".join(d.content for d in sent if d) == "Observant"


@pytest.mark.parametrize(
    ("sampled", "content", "reasoning", "arguments"),
    [
        ("go Obs: on", "go", "", []),
        ("<think>hm Obs: x</think>4", "", "hm", []),
        (
            'a<tool_call>{"name": "f", "arguments": {"a": "Obs: "}}</tool_call>',
            "a",
            "",
            ['{"a": "'],
        ),
        ('a<tool_call>{"na Obs: ', 'a<tool_call>{"na', "", []),
    ],
)
def test_nothing_after_a_stop_string_is_in_the_reply(
    prompts: Prompts,
    tokenizer: Tokenizer,
    sampled: str,
    content: str,
    reasoning: str,
    arguments: list[str],
) -> None:
    answer = read(
        prompts.reader(ParseOptions(("Obs:",), True)), tokenizer.encode(sampled), [1] * 99
    )
    assert (answer.content, answer.reasoning) == (content, reasoning)
    assert [call.arguments for call in answer.tool_calls] == arguments


@pytest.mark.parametrize(
    ("block", "calls"),
    [
        ('{"name": "f", "arguments": {"a": [1, {}]}}', [("f", '{"a": [1, {}]}')]),
        ('{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}')]),
        ('{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "\\u0066", "arguments": {}}', [("f", "{}")]),
        ('{"name": "", "arguments": {}}', []),
        ('{"name": "\\ud800", "arguments": {}}', []),
        ("{nope", []),
        ("[]", []),
    ],
)
def test_a_block_is_a_call_as_soon_as_its_name_is_complete(
    prompts: Prompts, tokenizer: Tokenizer, block: str, calls: list[tuple[str, str]]
) -> None:
    ids = tokenizer.encode(f"so <tool_call>\n{block}\n</tool_call>{END}")
    answer = read(prompts.reader(ParseOptions((), True, "p")), ids, [1] * len(ids))
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert [call.id for call in answer.tool_calls] == [f"p_{n}" for n in range(len(calls))]
    text = "so" if calls else f"so <tool_call>\n{block}\n</tool_call>"
    assert answer.content == text


def test_a_reply_truncated_in_a_call_keeps_the_sampled_part(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    sampled = '<tool_call>\n{"name": "f", "arguments": {"a": "long'
    answer = read(prompts.reader(ParseOptions((), True, "c")), tokenizer.encode(sampled), [3])
    assert answer == ParsedReply("", "", (ToolCall("c_0", "f", '{"a": "long'),))


def test_text_after_a_call_comes_last(prompts: Prompts, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"so {CALL} and on{END}")
    answer = read(prompts.reader(ParseOptions((), True)), ids, [1] * len(ids))
    assert answer.content == "so  and on"
    assert len(answer.tool_calls) == 1


@pytest.mark.parametrize(
    ("sampled", "content", "reasoning", "num_calls"),
    [
        (f"<think>maybe {CALL} no</think>4", "4", f"maybe {CALL} no", 0),
        (f"<think>why {CALL}", "", "why", 1),
        (f"<think>why {CALL}{END}", "", "why", 1),
        ("<think>\nwas cut ", "", "was cut", 0),
        ("A <think>why</think>", "A <think>why</think>", "", 0),
    ],
)
def test_a_call_in_reasoning_is_ignored_if_the_reasoning_is_closed(
    prompts: Prompts,
    tokenizer: Tokenizer,
    sampled: str,
    content: str,
    reasoning: str,
    num_calls: int,
) -> None:
    ids = tokenizer.encode(sampled)
    answer = read(prompts.reader(ParseOptions((), True)), ids, [1] * len(ids))
    assert (answer.content, answer.reasoning) == (content, reasoning)
    assert len(answer.tool_calls) == num_calls


@pytest.mark.parametrize(
    ("sampled", "content", "reasoning"),
    [
        (f"so {CALL}", f"so {CALL}", ""),
        ("<think>why</think>A<tool_call>B", "A<tool_call>B", "why"),
        ("<think>why<tool_call>B", "", "why<tool_call>B"),
        ("A <think>why</think><tool_call>B", "A <think>why</think><tool_call>B", ""),
    ],
)
def test_markup_is_text_where_no_calls_are_parsed(
    prompts: Prompts, tokenizer: Tokenizer, sampled: str, content: str, reasoning: str
) -> None:
    answer = read(prompts.reader(ParseOptions((), False)), tokenizer.encode(sampled), [2])
    assert answer == ParsedReply(content, reasoning)


def test_xml_values_become_json_of_their_declared_types(tokenizer: Tokenizer) -> None:
    marks = marks_of(tokenizer, CallStyle.XML)
    ids = tokenizer.encode(f"so\n{XML}{END}")
    reader = StreamingParser(tokenizer, marks, ParseOptions(reads_calls=True, tools=TOOLS))
    answer = read(reader, ids, [1] * len(ids))
    assert answer.content == "so"
    assert [call.arguments for call in answer.tool_calls] == ['{"s": "  one\\ntwo", "n": 12}']
