"""The account of a finished relay session: its calls, and samples of those with exact tokens.

- A call makes a sample if its answer is whole and was delivered, and has prompt ids, token ids and
  a log-prob for each. A prompt that begins with an earlier call's tokens continues from its node,
  so a conversation is one sample and not one for each call.
- Every other call is kept as text; each record lists what it lacks, and why an answer is `failed`
  or `unread`.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.types import Branch, NodeRow, SamplingParams, VersionRun
from rollmesh.engine.answers import policy_version_of
from rollmesh.runtime.chat import Rotating
from rollmesh.runtime.forks import excerpts
from rollmesh.runtime.token_graph import ROOT, Sampled, TokenGraph
from rollmesh.serve.interception.pieces import Piece, cut, joined
from rollmesh.serve.interception.relay.call import Asked, CallState, RelayCall
from rollmesh.serve.interception.relay.heard import EMPTY_STREAM, Answer, Heard
from rollmesh.serve.interception.relay.lines import branches_of_calls
from rollmesh.serve.interception.relay.threads import Request, Spot
from rollmesh.serve.interception.relay.verdict import answer_of
from rollmesh.serve.interception.report import ReportWriter, RewardSlot, SessionReport, cut_samples

UNVERSIONED = -1
_SHOWN_BYTES = 4096
"""Bytes of a long text or image that a fork row may compare."""
_NEEDED = frozenset({"prompt_token_ids", "token_ids", "logprobs", "whole_stream"})
"""A choice that lacks one of these makes no sample."""


def account_of(
    session_id: str, calls: Sequence[RelayCall], rotating: Rotating = None
) -> SessionReport:
    """See CapturedSession.account; `rotating` matches lines of system texts that are ignored."""
    ledger, writer = _Ledger(branches_of_calls(calls, rotating)), ReportWriter()
    writer.rows("calls", (ledger.record(call) for call in calls))
    writer.rows("samples", ledger.samples())
    writer.listed("messages", ledger.messages())
    writer.field("forks", _fork_rows(calls))
    writer.field("healed", {})
    writer.field("num_calls", len(calls))
    writer.field("capture", "relay")
    return writer.account(session_id, ledger.names, range(len(calls)))


class _Ledger:
    """Gathers the tokens of all calls in one token graph."""

    def __init__(self, branches: dict[int, Branch]) -> None:
        """`branches` are those of the calls, by their numbers."""
        self.names: dict[str, int] = {}
        """Calls by the ids of their answers."""
        self._call_branches = branches
        self._graph = TokenGraph()
        self._paths: list[tuple[list[int], int]] = []
        """(all tokens up to and with a call's answer, its node), newest last."""
        self._numbers: dict[int, int] = {}
        """Calls by their rows in the graph."""
        self._root_branches: dict[int, Branch] = {}
        """By the graph's roots."""
        self._last: tuple[bool, Request, Heard] | None = None
        """Whether it is on the main line, the history and the answer of the last good call."""

    def record(self, call: RelayCall) -> tuple[RewardSlot, dict[str, Any]]:
        """One call, as JSON values."""
        asked, number = call.asked, call.asked.number
        request = asked.request
        record: dict[str, Any] = {
            "node": number,
            "route": asked.route,
            "asked_s": asked.asked_s,
            "settings": msgspec.Raw(joined([request.settings])) if request else None,
            "state": call.state.value,
            "status": call.status or None,
            "delivered": call.is_delivered,
            "branch": self._call_branches.get(number, "main"),
            "choices": [],
        }
        if asked.body:
            record["body"] = joined(asked.body).decode(errors="backslashreplace")
        if call.failure is not None:
            record["error"] = str(call.failure)
            if str(call.failure).endswith(EMPTY_STREAM):
                record |= {"state": "unread", "unread": EMPTY_STREAM}
        if call.state is CallState.WHOLE and call.status == 200:
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
        """The history and the answer of the main line's last good call, or of the last one."""
        if self._last is None:
            return []
        _, request, heard = self._last
        said = heard.message.get("output", [heard.message])
        return [*request.spot.messages(), *[cut(msgspec.json.encode(each)) for each in said]]

    def _add(self, call: RelayCall, answer: Answer, record: dict[str, Any]) -> None:
        """Add a complete answer with status 200 to the record of its call, and to samples."""
        if answer.unread:
            record["unread"] = answer.unread
        if answer.failure:
            record["error"] = answer.failure
        if not answer.choices:
            record["state"] = "unread" if answer.unread else "failed"
            return
        asked, choices = call.asked, answer.choices
        is_good = call.is_delivered and len(choices) == 1
        record["choices"] = [self._choice(each, call, is_good) for each in choices]
        self.names.update({each.response_id: asked.number for each in choices})
        if call.is_delivered and asked.request is not None:
            is_main = record["branch"] == "main"
            if self._last is None or is_main or not self._last[0]:
                self._last = is_main, asked.request, choices[0]

    def _choice(self, heard: Heard, call: RelayCall, is_good: bool) -> dict[str, Any]:
        lacks = _lacks(heard)
        choice = {
            "message": heard.message,
            "finish_reason": heard.finish_reason,
            "token_ids": heard.token_ids,
            "logprobs": heard.logprobs,
            "lacks": lacks,
        }
        if is_good and _NEEDED.isdisjoint(lacks):
            self._numbers[self._hold(heard, call)] = call.asked.number
        return choice

    def _hold(self, heard: Heard, call: RelayCall) -> int:
        assert heard.prompt_ids is not None
        assert heard.token_ids is not None
        assert heard.logprobs is not None
        prompt = heard.prompt_ids
        parent, start = ROOT, 0
        for path, row in self._paths:
            if start < len(path) <= len(prompt) and prompt[: len(path)] == path:
                parent, start = row, len(path)
        root, parent = parent, self._graph.add_context(parent, array("i", prompt[start:]))
        if root == ROOT:
            self._root_branches[parent] = self._call_branches.get(call.asked.number, "main")
        sampled = Sampled(
            array("i", heard.token_ids),
            array("f", heard.logprobs),
            _runs(heard),
            SamplingParams(max_tokens=len(heard.token_ids), temperature=_temperature(call.asked)),
            heard.finish_reason,
            dialect="relay",
        )
        row = self._graph.add_sampled(parent, sampled)
        self._paths.append((prompt + heard.token_ids, row))
        return row


def _fork_rows(calls: Sequence[RelayCall]) -> list[dict[str, Any]]:
    """A row for each fork: the first message that differs, as held and as it came, both as JSON."""
    rows: list[dict[str, Any]] = []
    seen: set[Spot] = set()
    for call in calls:
        if (request := call.asked.request) is None:
            continue
        spot, new = request.spot, []
        while spot.parent is not None and spot not in seen:
            new.append(spot)
            spot = spot.parent
        if request.fork:
            others = [each for each in (spot.children or {}).values() if each in seen]
            first = [_text_of(each) for each in (*others[-1:], *new[-1:])]
            held, got = excerpts(first[0] if others else "", first[-1] if new else "")
            row = {"call": call.asked.number, "cause": request.fork, "message": spot.depth}
            rows.append({**row, "held": held, "got": got})
        seen.update(new)
    return rows


def _text_of(spot: Spot) -> str:
    """The JSON of a message; of long texts and images in it the beginning."""
    parts = [
        each if isinstance(each, bytes) else each.read()[:_SHOWN_BYTES] for each in spot.pieces
    ]
    return b"".join(parts).decode(errors="backslashreplace")


def _lacks(heard: Heard) -> list[str]:
    """Names of what this choice would need to be as exact as one of capture mode `tokens`."""
    ids, logprobs = heard.token_ids, heard.logprobs
    told = {
        "prompt_token_ids": heard.prompt_ids,
        "token_ids": ids,
        "logprobs": logprobs is not None and (ids is None or len(ids) == len(logprobs)),
        "whole_stream": heard.is_gapless,
        "policy_versions": _runs(heard)[0].policy_version != UNVERSIONED if ids else False,
    }
    return [name for name, is_told in told.items() if not is_told] + ["sampling_policy"]


def _runs(heard: Heard) -> tuple[VersionRun, ...]:
    num_tokens = len(heard.token_ids or ())
    runs = [VersionRun(policy_version_of(text), num) for text, num in heard.versions or ()]
    if sum(run.num_tokens for run in runs) != num_tokens:
        runs = [VersionRun(UNVERSIONED, num_tokens)]
    return tuple(runs)


def _temperature(asked: Asked) -> float:
    """The requested temperature; 1, the APIs' default, where none was requested."""
    try:
        settings = orjson.loads(joined([asked.request.settings])) if asked.request else {}
    except orjson.JSONDecodeError:  # a number that no float holds
        settings = {}
    temperature = settings.get("temperature")
    return float(temperature) if isinstance(temperature, int | float) else 1.0
