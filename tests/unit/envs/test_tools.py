"""Tools: the schema of a function; calls, results and errors become text for the model."""

import asyncio
import functools
import json
import threading
import weakref
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.envs.calls import EnvCalls, num_left_behind
from rollmesh.envs.chat import ToolCall
from rollmesh.envs.tools import Tool, Toolbox, ToolResult, ToolSettings, as_text


class Place(msgspec.Struct):
    x: int
    y: int = 0


def search(
    words: str,
    places: list[Place] | None = None,
    order: Literal["new", "old"] = "new",
    limit: Annotated[int, msgspec.Meta(ge=1, le=50)] = 10,
) -> str:
    """Search the library.

    Looks at titles only.

    Args:
        words: what to look for
        limit: how many titles, at most
    """
    return f"{words} {places} {order} {limit}"


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        """Add to the total."""
        self.total += number
        return self.total


def ignore(**_: object) -> None: ...


def untyped(a) -> None: ...  # type: ignore[no-untyped-def]


def positional(a: int, /) -> None: ...


def unspeakable(a: Callable[[], int]) -> None: ...


def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821 - the point


async def call(
    functions: list[Callable[..., Any]], name: str, arguments: str, **settings: Any
) -> ToolResult:
    toolbox = Toolbox(functions)
    return await toolbox.call(
        EnvCalls(grace_s=0.1), ToolCall("c", name, arguments), ToolSettings(**settings)
    )


def test_a_schema_has_types_defaults_bounds_and_the_docstring() -> None:
    spec = Tool(search).spec
    assert spec["type"] == "function"
    function = spec["function"]
    assert function["name"] == "search"
    assert function["description"] == "Search the library.\n\nLooks at titles only."
    schema = function["parameters"]
    assert schema["type"] == "object"
    assert schema["required"] == ["words"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["words"] == {"type": "string", "description": "what to look for"}
    assert properties["order"] == {"enum": ["new", "old"], "default": "new"}
    assert properties["limit"]["description"] == "how many titles, at most"
    assert (properties["limit"]["minimum"], properties["limit"]["maximum"]) == (1, 50)
    assert properties["places"]["anyOf"][0]["items"] == {"$ref": "#/$defs/Place"}
    assert schema["$defs"]["Place"]["required"] == ["x"]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (ignore, "cannot be given by its name"),
        (untyped, "a has no type hint"),
        (positional, "cannot be given by its name"),
        (unspeakable, "no JSON schema"),
        (unknown, "Nowhere"),
        (functools.partial(search), "must be a function with a name"),
        (lambda a: a, "must be a function with a name"),
    ],
)
def test_function_without_a_schema_is_refused_in_one_line(
    function: Callable[..., Any], why: str
) -> None:
    with pytest.raises(EnvError, match=why) as caught:
        Tool(function)
    assert len(str(caught.value).splitlines()) == 1


def test_a_toolbox_releases_its_closure_and_shares_one_schema() -> None:
    class Browser:
        """A counter of one rollout."""

    def tools_of(browser: Browser) -> Toolbox:
        def click(at: int, times: list[int] = []) -> str:  # noqa: B006 - users write such
            """Click."""
            return f"{browser} {at} {times}"

        return Toolbox([click])

    first, browser = tools_of(Browser()), Browser()
    seen = weakref.ref(browser)
    again = tools_of(browser)
    assert again.specs[0] is first.specs[0]
    del browser, again
    assert seen() is None


def test_an_unhashable_type_hint_is_accepted() -> None:
    def jump(far: Annotated[int, msgspec.Meta(examples=[1, 2])]) -> str:
        return str(far)

    spec: Any = Tool(jump).spec
    assert spec["function"]["parameters"]["properties"]["far"]["examples"] == [1, 2]


def test_functions_of_one_decorator_have_their_own_schemas() -> None:
    def logged(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def logs(*args: Any, **kwargs: Any) -> str:
            return function(*args, **kwargs)

        return logs

    def of_default(limit: int) -> Callable[..., str]:
        def find(word: str, most: int = limit) -> str:
            return word * most

        return logged(find)

    specs = [Tool(of_default(limit)).spec for limit in (1, 2)]
    parameters: list[Any] = [spec["function"]["parameters"] for spec in specs]
    assert [each["properties"]["most"]["default"] for each in parameters] == [1, 2]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(EnvError, match="one name: search, search"):
        Toolbox([search, search])


async def test_arguments_are_checked_converted_and_passed() -> None:
    arguments = '{"words": "sea", "places": [{"x": 1}], "limit": "3"}'
    result = await call([search], "search", arguments)
    assert result == ToolResult("sea [Place(x=1, y=0)] new 3")


async def test_methods_share_the_state_of_their_object() -> None:
    counter = Counter()
    assert await call([counter.add], "add", '{"number": 2}') == ToolResult("2")
    assert await call([counter.add], "add", '{"number": 5}') == ToolResult("7")
    assert "self" not in Tool(counter.add).spec["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "truncated"),
        ("[]", "array"),
        ("{}", "missing required field `words`"),
        ('{"words": "a", "more": 1}', "unknown field `more`"),
        ('{"words": "a", "limit": 0}', ">= 1"),
        ('{"words": "a", "order": "best"}', "best"),
        ('{"words": "a", "places": [{}]}', "places"),
        ("", "missing required field `words`"),
    ],
)
async def test_wrong_arguments_are_returned_to_the_model(arguments: str, why: str) -> None:
    result = await call([search], "search", arguments)
    assert result.failed
    assert result.text.startswith("error: wrong arguments for search: ")
    assert why in result.text


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.text(),
        st.dictionaries(
            st.sampled_from(["words", "places", "order", "limit", "x"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3),
                max_leaves=5,
            ),
        ).map(json.dumps),
    )
)
def test_any_arguments_of_a_model_yield_a_text_result(arguments: str) -> None:
    result = asyncio.run(call([search], "search", arguments))
    assert isinstance(result.text, str)
    assert result.failed == result.text.startswith("error: wrong arguments for search: ")


async def test_unknown_tool_is_answered_with_the_available_ones() -> None:
    result = await call([search], "find", "{}")
    assert result == ToolResult("error: there is no tool find; there are: search", failed=True)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such title"), "error: ValueError: no such title"),
        (SystemExit(3), "sys.exit(3)"),
        (TimeoutError("theirs"), "error: TimeoutError: theirs"),
    ],
)
async def test_a_tools_error_is_returned_to_the_model(error: BaseException, text: str) -> None:
    def broken() -> None:
        raise error

    result = await call([broken], "broken", "{}")
    assert result.failed
    assert text in result.text


async def test_an_infra_error_of_a_tool_is_not_returned_to_the_model() -> None:
    def broken() -> None:
        raise InfraError("the database is down")

    with pytest.raises(InfraError):
        await call([broken], "broken", "{}")


async def test_a_plain_tool_does_not_block_the_loop_and_ends_at_its_limit() -> None:
    may_end = threading.Event()

    def stuck() -> None:
        may_end.wait()

    num_before = num_left_behind()
    result = await call([stuck], "stuck", "{}", timeout_s=0.05)
    # The worker counts abandoned threads and is replaced if there are many.
    assert num_left_behind() == num_before + 1
    may_end.set()
    assert result == ToolResult("error: stuck did not end within 0.05 s", failed=True)


async def test_coroutine_tool_is_cancelled_at_its_limit() -> None:
    ended = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    result = await call([stuck], "stuck", "{}", timeout_s=0.05)
    assert (result.failed, ended) == (True, [True])


async def test_a_long_result_is_cut_in_the_middle() -> None:
    def much() -> str:
        return "a" * 100 + "b" * 100

    result = await call([much], "much", "{}", max_chars=20)
    assert result.text == "aaaaaaaaaa\n[... 180 characters left out ...]\nbbbbbbbbbb"


async def test_a_result_with_surrogates_can_be_sent() -> None:
    def name() -> str:
        """A file name that is not UTF-8, as os.listdir returns it."""
        return b"caf\xe9".decode("utf-8", "surrogateescape")

    assert (await call([name], "name", "{}")).text == "caf?"


def test_a_result_other_than_text_is_json_or_its_repr() -> None:
    assert as_text({"a": [1, None]}) == '{"a":[1,null]}'
    assert as_text(Place(1)) == '{"x":1,"y":0}'
    assert as_text(object).startswith("<class")
    assert as_text(None) == "null"
