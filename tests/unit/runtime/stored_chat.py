"""A message history with requests and answers, and invented node numbers."""

from collections.abc import Sequence

import msgspec

from rollmesh.runtime.chat import ChatMessage, Rotating, Turn, compile_rotating, read_message
from rollmesh.runtime.conversation.forks import ForkCause, ForkLog, cause_of, where
from rollmesh.runtime.conversation.history import MessageHistory
from rollmesh.runtime.conversation.message_trie import Match, MessageNode

Message = dict[str, object]

SYSTEM: Message = {"role": "system", "content": "rules"}
USER: Message = {"role": "user", "content": "guess"}
ANSWER: Message = {"role": "assistant", "content": "4"}
MORE: Message = {"role": "user", "content": "higher"}
TOOLS = b'[{"type":"function","function":{"name":"f"}}]'
ROTATING = compile_rotating(["Today's date"])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turn(*messages: Message, tools: bytes = b"") -> Turn:
    return Turn(messages=[msgspec.json.encode(message) for message in messages], tools=tools)


def array_turn(*messages: Message) -> Turn:
    """Return a turn with its units in one array."""
    return Turn(messages=[], messages_raw=msgspec.json.encode(messages))


class StoredChat:
    """A history that stores requests and answers."""

    def __init__(self, rotating: Rotating = ROTATING) -> None:
        self.history = MessageHistory(rotating)
        self.log = ForkLog()
        self.num_nodes = 0
        self.cause: ForkCause | None = None
        """Cause of the newest request's fork."""
        self.where = (0, "", "")

    def ask(self, asked: Turn) -> tuple[Match, MessageNode]:
        match = self.history.match(asked)
        self.cause = cause_of(self.history, match)
        self.where = where(self.history, match)
        self.log.add_healed(self.history, match)
        if match.is_held:
            return match, self.history.hold(match, match.message_node.node)
        self.num_nodes += 1
        return match, self.history.hold(match, self.num_nodes - 1)

    def answer(self, context: MessageNode, message: Message) -> MessageNode:
        self.num_nodes += 1
        read = read_message(msgspec.json.encode(message), 0)
        self.history.add_sampled(context, read, self.num_nodes - 1)
        answer = self.history.answer_at(self.num_nodes - 1)
        assert answer is not None
        return answer

    def play(self, *messages: Message, tools: bytes = b"") -> None:
        """Request up to each assistant message, and add that message as the answer."""
        for n, message in enumerate(messages):
            if message["role"] == "assistant":
                _, context = self.ask(turn(*messages[:n], tools=tools))
                self.answer(context, message)

    def texts(self, message_node: MessageNode) -> Sequence[str]:
        return [self.history.read(each).text() for each in message_node.line()]


def texts(messages: Sequence[ChatMessage]) -> Sequence[str]:
    return [message.text() for message in messages]
