"""Which part of a request is held, and why a request forks."""

import msgspec
import pytest

from rollmesh.runtime.history import ForkCause, History, Match, Spot
from rollmesh.runtime.turns import Turn, read_message

SYSTEM: dict[str, object] = {"role": "system", "content": "rules"}
USER: dict[str, object] = {"role": "user", "content": "guess"}
SAID: dict[str, object] = {"role": "assistant", "content": "4"}
MORE: dict[str, object] = {"role": "user", "content": "higher"}
TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


def turn(*messages: dict[str, object], tools: bytes = b"") -> Turn:
    return Turn(messages=[msgspec.json.encode(message) for message in messages], tools=tools)


class Held:
    """A history that was asked and answered, with made-up node numbers."""

    def __init__(self) -> None:
        self.history = History()
        self.num_nodes = 0

    def ask(self, asked: Turn) -> tuple[Match, Spot]:
        match = self.history.match(asked)
        if match.is_held:
            return match, match.spot
        self.num_nodes += 1
        return match, self.history.add_context(match, asked.messages, self.num_nodes - 1)

    def say(self, context: Spot, message: dict[str, object]) -> Spot:
        raw = msgspec.json.encode(message)
        self.num_nodes += 1
        return self.history.add_sampled(context, raw, read_message(raw, 0), self.num_nodes - 1)


@pytest.fixture
def held() -> Held:
    """One finished turn: context node 0, sampled node 1."""
    held = Held()
    _, context = held.ask(turn(SYSTEM, USER))
    held.say(context, SAID)
    return held


def test_the_first_request_is_new_and_no_fork() -> None:
    match, _ = Held().ask(turn(SYSTEM, USER))
    assert (match.num_held, len(match.new), match.cause) == (0, 2, None)


def test_an_extension_builds_on_what_was_sampled(held: Held) -> None:
    match, _ = held.ask(turn(SYSTEM, USER, SAID, MORE))
    assert (match.spot.node, match.num_held, match.cause) == (1, 3, None)
    assert [message.text() for message in match.new] == ["higher"]


def test_the_same_messages_again_are_held(held: Held) -> None:
    match, spot = held.ask(turn(SYSTEM, USER))
    assert match.is_held
    assert spot.node == 0


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "\n4"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "content": "4", "reasoning_content": "hm", "extra": {}},
    ],
)
def test_an_echo_that_means_the_same_is_healed(held: Held, echo: dict[str, object]) -> None:
    match, _ = held.ask(turn(SYSTEM, USER, echo, MORE))
    assert match.spot.node == 1
    assert match.cause is None
    again, _ = held.ask(turn(SYSTEM, USER, echo, MORE))
    assert again.is_held


def test_tools_in_other_spelling_are_the_same_tools() -> None:
    held = Held()
    _, context = held.ask(turn(USER, tools=TOOLS))
    held.say(context, SAID)
    other = msgspec.json.format(TOOLS, indent=2)
    assert held.ask(turn(USER, SAID, MORE, tools=other))[0].spot.node == 1


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        (turn(SYSTEM, USER, SAID, MORE, tools=TOOLS), ForkCause.TOOLS_CHANGED),
        (turn({"role": "system", "content": "other"}, USER), ForkCause.SYSTEM_CHANGED),
        (turn(MORE), ForkCause.RESTARTED),
        (turn(SYSTEM, {"role": "user", "content": "in short"}), ForkCause.COMPACTED),
        (
            turn(SYSTEM, USER, {"role": "assistant", "content": "5"}, MORE),
            ForkCause.HISTORY_EDITED,
        ),
        (turn(SYSTEM, USER, SAID, USER, SAID, MORE), ForkCause.HISTORY_EDITED),
    ],
)
def test_a_fork_says_its_cause(held: Held, asked: Turn, cause: ForkCause) -> None:
    assert held.ask(asked)[0].cause == cause


def test_going_back_to_an_earlier_turn_is_a_rewind(held: Held) -> None:
    held.ask(turn(SYSTEM, USER, SAID, MORE))
    other: dict[str, object] = {"role": "user", "content": "lower"}
    match, _ = held.ask(turn(SYSTEM, USER, SAID, other))
    assert (match.spot.node, match.cause) == (1, ForkCause.REWOUND)


def test_asking_on_after_an_answer_leaves_the_answer_its_tokens(held: Held) -> None:
    asked_on = turn(SYSTEM, USER, SAID)
    match, context = held.ask(asked_on)
    assert (match.spot.node, match.num_held, match.new) == (1, 3, [])
    assert held.ask(asked_on)[0].is_held
    assert held.ask(turn(SYSTEM, USER, SAID, MORE))[0].spot.node == 1
    more: dict[str, object] = {"role": "assistant", "content": "or 5"}
    answer = held.say(context, more)
    match, last = held.ask(turn(SYSTEM, USER, SAID, more, MORE))
    assert match.spot is answer
    shown = [msgspec.json.decode(raw)["content"] for raw in last.messages()]
    assert shown == ["rules", "guess", "4", "or 5", "higher"]


def test_each_message_is_held_once(held: Held) -> None:
    before = held.history.num_bytes
    asked = turn(SYSTEM, USER, SAID, MORE)
    _, spot = held.ask(asked)
    assert held.history.num_bytes == before + len(asked.messages[-1])
    assert spot.messages() == asked.messages
