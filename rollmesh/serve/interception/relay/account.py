"""Build the report of a finished relay session: its calls, and samples of those with exact tokens.

- A call yields a sample if its answer is whole and delivered, and has prompt ids, token ids and a
  log-prob for each. A prompt that begins with an earlier call's tokens continues from its node, so
  a conversation is one sample.
- Other calls are kept as text; each record lists the fields that it lacks, and why an answer is
  `failed` or `unread`.
- Calls are assigned to branches by their requests: tools without cache markers, system text without
  rotating lines, first message (runtime/conversation/token_graph.py).
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.types import (
    UNVERSIONED,
    Branch,
    NodeRow,
    SamplingParams,
    VersionRun,
    policy_version_of,
)
from rollmesh.runtime.chat import ROLES, Rotating, settled
from rollmesh.runtime.conversation.forks import excerpts
from rollmesh.runtime.conversation.token_graph import (
    ROOT,
    RootChat,
    RootKind,
    Sampled,
    TokenGraph,
    assign,
)
from rollmesh.serve.interception.dialects.dialect import UpstreamChoice
from rollmesh.serve.interception.pieces import Piece, cut, joined
from rollmesh.serve.interception.relay.call import CallRequest, ForwardState, RelayCall, answer_of
from rollmesh.serve.interception.relay.history import HistoryNode, StoredRequest
from rollmesh.serve.interception.relay.upstream_answer import (
    EMPTY_STREAM,
    UpstreamAnswer,
)
from rollmesh.serve.interception.report import ReportWriter, RewardSlot, SessionReport, cut_samples

_SHOWN_BYTES = 4096
"""Bytes of a long text or image that a fork row compares."""
_NEEDED = frozenset({"prompt_token_ids", "token_ids", "logprobs", "whole_stream"})
"""A choice that lacks one of these yields no sample."""


def account_of(
    session_id: str, calls: Sequence[RelayCall], rotating: Rotating = None
) -> SessionReport:
    """The report of a session; `rotating` matches lines of system texts that are ignored."""
    builder, writer = _AccountBuilder(branches_of_calls(calls, rotating)), ReportWriter()
    writer.rows("calls", (builder.record(call) for call in calls))
    writer.rows("samples", builder.samples())
    writer.listed("messages", builder.messages())
    writer.field("forks", _fork_rows(calls))
    writer.field("healed", {})
    writer.field("num_calls", len(calls))
    writer.field("capture", "relay")
    return writer.build(session_id, builder.names, range(len(calls)))


class _AccountBuilder:
    """Collects the tokens of all calls in one token graph."""

    def __init__(self, branches: dict[int, Branch]) -> None:
        """`branches` has the branch of each call, by its number."""
        self.names: dict[str, int] = {}
        """Call numbers by the ids of their answers."""
        self._call_branches = branches
        self._graph = TokenGraph()
        self._paths: list[tuple[list[int], int]] = []
        """(all tokens up to the end of a call's answer, its node), newest last."""
        self._numbers: dict[int, int] = {}
        """Call numbers by their rows in the graph."""
        self._root_branches: dict[int, Branch] = {}
        """By the graph's roots."""
        self._last: tuple[bool, StoredRequest, UpstreamChoice] | None = None
        """The last usable call: whether it is on the main branch, its request and its answer."""

    def record(self, call: RelayCall) -> tuple[RewardSlot, dict[str, Any]]:
        """The record of one call, as JSON values."""
        request, number = call.request, call.request.number
        stored = request.stored
        record: dict[str, Any] = {
            "node": number,
            "route": request.route,
            "asked_s": request.asked_s,
            "settings": msgspec.Raw(joined([stored.settings])) if stored else None,
            "state": call.state.value,
            "status": call.status or None,
            "delivered": call.is_delivered,
            "branch": self._call_branches.get(number, "main"),
            "choices": [],
        }
        if request.body:
            record["body"] = joined(request.body).decode(errors="backslashreplace")
        if call.failure is not None:
            record["error"] = str(call.failure)
            if str(call.failure).endswith(EMPTY_STREAM):
                record |= {"state": "unread", "unread": EMPTY_STREAM}
        if call.state is ForwardState.WHOLE and call.status == 200:
            self._add(call, answer_of(call), record)
        return RewardSlot((number,), has_default=False), record

    def samples(self) -> Iterator[tuple[RewardSlot, dict[str, Any]]]:
        """The samples of all calls with exact tokens."""
        graph, numbers = self._graph, self._numbers
        rows: list[NodeRow] = graph.rows(self._root_branches)
        for sample in cut_samples(rows, graph.token_ids, graph.logprobs):
            path = [numbers[row] for row in sample["nodes"] if row in numbers]
            yield RewardSlot(tuple(path), has_default=True), sample

    def messages(self) -> list[tuple[Piece, ...]]:
        """History and answer of the last usable call, preferably of the main branch."""
        if self._last is None:
            return []
        _, stored, choice = self._last
        answer = choice.message.get("output", [choice.message])
        return [*stored.node.messages(), *[cut(msgspec.json.encode(each)) for each in answer]]

    def _add(self, call: RelayCall, answer: UpstreamAnswer, record: dict[str, Any]) -> None:
        """Add a complete answer with status 200 to the record of its call and to the samples."""
        if answer.unread:
            record["unread"] = answer.unread
        if answer.failure:
            record["error"] = answer.failure
        if not answer.choices:
            record["state"] = "unread" if answer.unread else "failed"
            return
        request, choices = call.request, answer.choices
        is_good = call.is_delivered and len(choices) == 1
        record["choices"] = [self._choice(each, call, is_good) for each in choices]
        self.names.update({each.response_id: request.number for each in choices})
        if call.is_delivered and request.stored is not None:
            is_main = record["branch"] == "main"
            if self._last is None or is_main or not self._last[0]:
                self._last = is_main, request.stored, choices[0]

    def _choice(self, choice: UpstreamChoice, call: RelayCall, is_good: bool) -> dict[str, Any]:
        lacks = _lacks(choice)
        row = {
            "message": choice.message,
            "finish_reason": choice.finish_reason,
            "token_ids": choice.token_ids,
            "logprobs": choice.logprobs,
            "lacks": lacks,
        }
        if is_good and _NEEDED.isdisjoint(lacks):
            self._numbers[self._add_sampled(choice, call)] = call.request.number
        return row

    def _add_sampled(self, choice: UpstreamChoice, call: RelayCall) -> int:
        assert choice.prompt_ids is not None
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        prompt = choice.prompt_ids
        parent, start = ROOT, 0
        for path, row in self._paths:
            if start < len(path) <= len(prompt) and prompt[: len(path)] == path:
                parent, start = row, len(path)
        root, parent = parent, self._graph.add_context(parent, array("i", prompt[start:]))
        if root == ROOT:
            self._root_branches[parent] = self._call_branches.get(call.request.number, "main")
        sampled = Sampled(
            array("i", choice.token_ids),
            array("f", choice.logprobs),
            _runs(choice),
            SamplingParams(
                max_tokens=len(choice.token_ids), temperature=_temperature(call.request)
            ),
            choice.finish_reason,
            dialect="relay",
        )
        row = self._graph.add_sampled(parent, sampled)
        self._paths.append((prompt + choice.token_ids, row))
        return row


def _fork_rows(calls: Sequence[RelayCall]) -> list[dict[str, Any]]:
    """A row for each fork, with the first different message as stored and as received (JSON)."""
    rows: list[dict[str, Any]] = []
    seen: set[HistoryNode] = set()
    for call in calls:
        if (stored := call.request.stored) is None:
            continue
        node, new = stored.node, []
        while node.parent is not None and node not in seen:
            new.append(node)
            node = node.parent
        if stored.fork:
            others = [each for each in (node.children or {}).values() if each in seen]
            first = [_text_of(each) for each in (*others[-1:], *new[-1:])]
            held, got = excerpts(first[0] if others else "", first[-1] if new else "")
            row = {"call": call.request.number, "cause": stored.fork, "message": node.depth}
            rows.append({**row, "held": held, "got": got})
        seen.update(new)
    return rows


def _text_of(node: HistoryNode) -> str:
    """The JSON of a message; long texts and images in it are truncated."""
    parts = [
        each if isinstance(each, bytes) else each.read()[:_SHOWN_BYTES] for each in node.pieces
    ]
    return b"".join(parts).decode(errors="backslashreplace")


def _lacks(choice: UpstreamChoice) -> list[str]:
    """Names of the data that this choice lacks, compared to capture mode `tokens`."""
    ids, logprobs = choice.token_ids, choice.logprobs
    found = {
        "prompt_token_ids": choice.prompt_ids,
        "token_ids": ids,
        "logprobs": logprobs is not None and (ids is None or len(ids) == len(logprobs)),
        "whole_stream": choice.is_gapless,
        "policy_versions": _runs(choice)[0].policy_version != UNVERSIONED if ids else False,
    }
    return [name for name, is_found in found.items() if not is_found] + ["sampling_policy"]


def _runs(choice: UpstreamChoice) -> tuple[VersionRun, ...]:
    num_tokens = len(choice.token_ids or ())
    runs = [VersionRun(policy_version_of(text), num) for text, num in choice.versions or ()]
    if sum(run.num_tokens for run in runs) != num_tokens:
        runs = [VersionRun(UNVERSIONED, num_tokens)]
    return tuple(runs)


def _temperature(request: CallRequest) -> float:
    """The requested temperature; default 1, as in the APIs."""
    try:
        settings = orjson.loads(joined([request.stored.settings])) if request.stored else {}
    except orjson.JSONDecodeError:  # a number beyond the range of a float
        settings = {}
    temperature = settings.get("temperature")
    return float(temperature) if isinstance(temperature, int | float) else 1.0


def branches_of_calls(calls: Iterable[RelayCall], rotating: Rotating) -> dict[int, Branch]:
    """The branch of each answered call whose request could be parsed, by its number."""
    kinds, chats = _RootKinds(rotating), {}
    for call in calls:
        number, stored = call.request.number, call.request.stored
        if stored is not None and call.state is ForwardState.WHOLE and call.status == 200:
            num_calls = 1 if _is_single(stored) else 2
            chats[number] = RootChat(kinds.of(stored), number, number, num_calls)
    return assign(chats)


class _RootKinds:
    """Derives the kinds of requests; values that many requests share are parsed once."""

    def __init__(self, rotating: Rotating) -> None:
        self._rotating = rotating
        self._parsed_pieces: dict[Piece, Any] = {}
        self._messages: dict[HistoryNode, tuple[str, int]] = {}

    def of(self, request: StoredRequest) -> RootKind:
        """The kind of one request."""
        tools = self._parsed(request.tools)
        shown = b""
        if isinstance(tools, list) and tools:
            shown = orjson.dumps(_without_markers(tools), option=orjson.OPT_SORT_KEYS)
        settings = self._parsed(request.settings)
        instructions = settings.get("instructions") if isinstance(settings, dict) else None
        texts = [_content_text(self._parsed(request.system)), _content_text(instructions)]
        opening = 0
        for node in _nodes(request):
            text, opening = self._message(node)
            if opening:
                break
            texts.append(text)
        system = "\n".join(texts)
        if self._rotating is not None:
            system = settled(system, self._rotating)
        system = system.strip()
        return RootKind(hash(shown) if shown else 0, hash(system) if system else 0, opening)

    def _message(self, node: HistoryNode) -> tuple[str, int]:
        """The text of a system message and 0, or '' and the hash of another message."""
        if node not in self._messages:
            message = _parse(joined(node.pieces))
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and ROLES.get(role) == "system":
                self._messages[node] = _content_text(message.get("content")), 0
            else:
                plain = orjson.dumps(_without_markers(message), option=orjson.OPT_SORT_KEYS)
                self._messages[node] = "", hash(plain)
        return self._messages[node]

    def _parsed(self, piece: Piece) -> Any:
        if piece not in self._parsed_pieces:
            self._parsed_pieces[piece] = _parse(joined([piece]))
        return self._parsed_pieces[piece]


def _nodes(request: StoredRequest) -> list[HistoryNode]:
    """The messages of a history, oldest first."""
    nodes, node = [], request.node
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _is_single(request: StoredRequest) -> bool:
    """Whether no other request continues this one or is continued by it."""
    node = request.node
    while (parent := node.parent) is not None:
        if parent.request is not None:
            return False
        node = parent
    return not request.node.is_continued


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return raw.decode(errors="backslashreplace")


def _without_markers(value: Any) -> Any:
    """A JSON value without cache markers, which agents move from call to call."""
    if isinstance(value, list):
        return [_without_markers(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_markers(each) for key, each in value.items() if key != "cache_control"}


def _content_text(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join([text for text in texts if isinstance(text, str)])
