"""Tool calls are parsed as they are sampled; stop strings match across token boundaries."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.parsing import _parse_xml_tool_calls

from rollmesh.runtime.generation.events import StopHit
from rollmesh.runtime.tokens.tool_calls import (
    CallParser,
    CallStyle,
    JsonCall,
    StopStrings,
    XmlCall,
    arguments_text,
    call_opening,
    new_call,
    sole_function,
    string_parameters,
)

SCHEMAS = {"s": {"type": "string"}, "n": {"type": "integer"}, "u": {"anyOf": [{"type": "string"}]}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": SCHEMAS}}}
]
STRINGS = string_parameters(json.dumps(TOOLS).encode())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def joined_pieces(reader: CallParser, text: str, sizes: list[int]) -> str:
    """Return all pieces of a parser for a closed block, joined."""
    pieces, at = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(reader.feed(text[at : at + size]))
        at += size
    return "".join([*pieces, reader.close()])


@given(
    arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=4),
    indent=st.sampled_from([None, 2]),
    sizes=st.lists(st.integers(1, 7), max_size=40),
)
def test_the_arguments_of_a_json_call_are_streamed_unchanged(
    arguments: dict[str, Any], indent: int | None, sizes: list[int]
) -> None:
    written = json.dumps(arguments, ensure_ascii=False, indent=indent)
    reader = JsonCall()
    assert joined_pieces(reader, f'\n{{"name": "f", "arguments": {written}}}\n', sizes) == written
    assert reader.name == "f"


@given(
    values=st.dictionaries(st.sampled_from(["s", "n", "u", "x"]), JSON, max_size=4),
    sizes=st.lists(st.integers(1, 7), max_size=60),
)
def test_an_xml_call_is_parsed_as_by_the_library(values: dict[str, Any], sizes: list[int]) -> None:
    blocks = [f"<parameter={key}>\n{written(value)}\n</parameter>" for key, value in values.items()]
    block = "\n<function=f>\n" + "".join(f"{one}\n" for one in blocks) + "</function>\n"
    reader = XmlCall(STRINGS)
    parsed = joined_pieces(reader, block, sizes)
    assert reader.name == "f"
    assert json.loads(parsed) == library_arguments(block)


def written(value: Any) -> str:
    """Return a value as templates write it, without white space that the library strips and
    rollmesh keeps.
    """
    text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "x" if "<" in text else text


def library_arguments(block: str) -> Any:
    """Return the arguments of a whole block as the library parses them."""

    class Characters:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    (call,) = _parse_xml_tool_calls(
        Characters(),
        [-1, *map(ord, block), -2],
        -1,
        -2,
        section_offset=0,
        param_index={"f": SCHEMAS},
    )
    return call.arguments


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ("<function=f><parameter=s>\n  keep\n\n</parameter></function>", '{"s": "  keep\\n"}'),
        ("<function=f><parameter=s>12</parameter></function>", '{"s": "12"}'),
        ("<function=f><parameter=n>12</parameter></function>", '{"n": 12}'),
        ("<function=f><parameter=n>NaN</parameter></function>", '{"n": "NaN"}'),
        ("<function=f><parameter=s>a</par", '{"s": "a</par"}'),
        ("<function=f><parameter=n>1", '{"n": 1}'),
        ("<function=f><parameter=b>\nTrue\n</parameter></function>", '{"b": true}'),
        ("<function=f><parameter=s>\nTrue\n</parameter></function>", '{"s": "True"}'),
        ("<function=f></function>", "{}"),
        ("<function=f>", "{}"),
        ("function=f", ""),
    ],
)
def test_a_closed_block_of_xml_is_always_json(block: str, arguments: str) -> None:
    assert joined_pieces(XmlCall(STRINGS), block, [1] * len(block)) == arguments


def test_a_string_is_streamed_before_its_end_and_without_its_closing_tag() -> None:
    reader = XmlCall(STRINGS)
    assert reader.feed("<function=f>\n<parameter=s>\none ") == '{"s": "one '
    assert reader.feed("two\n</param") == "two"
    assert reader.feed("eter>\n</function>") == '"}'
    cut = XmlCall(STRINGS)
    assert cut.feed("<function=f><parameter=s>\none") + cut.cut() == '{"s": "one'


@pytest.mark.parametrize("style", CallStyle)
@pytest.mark.parametrize("name", ["f", ""])
def test_a_call_opening_begins_a_call(style: CallStyle, name: str) -> None:
    rest = {
        CallStyle.JSON: ' {"s": "x"}}' if name else ' "f", "arguments": {"s": "x"}}',
        CallStyle.XML: ("" if name else "f>") + "\n<parameter=s>\nx\n</parameter>\n</function>",
    }
    reader = new_call(style, STRINGS)
    assert joined_pieces(reader, "\n" + call_opening(style, name) + rest[style], []) == '{"s": "x"}'
    assert reader.name == "f"


def test_an_endless_name_costs_the_same_for_each_piece() -> None:
    reader = JsonCall()
    assert (
        joined_pieces(reader, '{"name": "' + "f" * 9000 + '", "arguments": {}}', [1] * 9000) == "{}"
    )
    assert reader.name == "f" * 9000


@pytest.mark.parametrize("tools", [b"", b"null", b"[1]", b'[{"function": {"parameters": 3}}]'])
def test_unreadable_tools_declare_no_types(tools: bytes) -> None:
    assert string_parameters(tools) == {}
    assert sole_function(tools) == ""


def test_half_a_surrogate_pair_is_unchanged() -> None:
    assert arguments_text("\ud800") == '"\\ud800"'
    assert arguments_text({"a": "\ud800"}) == '{"a": "\\ud800"}'


class Letters:
    """A vocabulary in which token n is the n-th letter of the alphabet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def ids(text: str) -> list[int]:
    return [ord(char) - ord("a") for char in text]


def matcher(*stops: str) -> StopStrings:
    return StopStrings(stops, Letters())


def test_a_hit_names_the_token_that_completes_the_stop() -> None:
    assert matcher("end").push(ids("theendofit")) == StopHit(6, "end")


def test_a_stop_string_may_begin_in_one_push_and_end_in_another() -> None:
    stops = matcher("stop")
    assert stops.push(ids("xxst")) is None
    assert stops.push(ids("o")) is None
    assert stops.push(ids("pyy")) == StopHit(6, "stop")


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert matcher("bcd", "bc").push(ids("abcd")) == StopHit(3, "bc")


def test_no_stop_string_never_hits() -> None:
    assert matcher("").push(ids("abc")) is None
    assert matcher("zz").push(ids("abcz")) is None


def test_a_stop_string_of_one_letter_is_found() -> None:
    stops = matcher("z")
    assert stops.push(ids("abc")) is None
    assert stops.push(ids("z")) == StopHit(4, "z")
