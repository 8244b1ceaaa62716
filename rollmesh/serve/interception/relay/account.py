"""What a finished relay session has to show: its calls, and samples where engines told enough.

A call makes a sample if its answer is whole, was delivered, and tells prompt ids, token ids and a
log-prob for each; a prompt that begins with an earlier call's tokens goes on from its node, so a
conversation is one sample and not one for each call. Everything else is kept as text, and each
record says what it lacks. Pure; driven by session.py.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.types import NodeRow, SamplingParams, VersionRun
from rollmesh.engine.answers import policy_version_of
from rollmesh.runtime.graph import ROOT, Sampled, TokenGraph
from rollmesh.serve.interception.account import Account, Hole, Writer
from rollmesh.serve.interception.cutting import cut_samples
from rollmesh.serve.interception.pieces import Piece, cut, joined
from rollmesh.serve.interception.relay.call import Asked, CallState, RelayCall
from rollmesh.serve.interception.relay.heard import Heard, hear

UNVERSIONED = -1


def account_of(session_id: str, calls: Sequence[RelayCall]) -> Account:
    """See CapturedSession.account."""
    ledger, writer = _Ledger(), Writer()
    writer.rows("calls", (ledger.record(call) for call in calls))
    writer.rows("samples", ledger.samples())
    told = [call for call in calls if _is_good(call) and call.asked.request]
    writer.listed("messages", _messages(told[-1]) if told else [])
    forks = [
        {"call": call.asked.number, "cause": call.asked.request.fork}
        for call in calls
        if call.asked.request and call.asked.request.fork
    ]
    writer.field("forks", forks)
    writer.field("healed", {})
    writer.field("num_calls", len(calls))
    writer.field("capture", "relay")
    return writer.account(session_id, ledger.names, range(len(calls)))


class _Ledger:
    """Gathers what calls told into one token graph."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        """Calls by the ids of their answers."""
        self._graph = TokenGraph()
        self._paths: list[tuple[list[int], int]] = []
        """(all tokens up to and with a call's answer, its node), newest last."""
        self._numbers: dict[int, int] = {}
        """Calls by their rows in the graph."""

    def record(self, call: RelayCall) -> tuple[Hole, dict[str, Any]]:
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
            "choices": [],
        }
        if asked.body:
            record["body"] = joined(asked.body).decode(errors="backslashreplace")
        if call.failure is not None:
            record["error"] = str(call.failure)
        if call.state is CallState.WHOLE and call.status == 200:
            choices = hear(asked.route, call.lines, call.body)
            is_good = call.is_delivered and len(choices) == 1
            record["choices"] = [self._choice(each, asked, is_good) for each in choices]
            self.names.update({each.response_id: number for each in choices})
        return Hole((number,), has_default=False), record

    def samples(self) -> Iterator[tuple[Hole, dict[str, Any]]]:
        """Of all calls that told enough."""
        graph, numbers = self._graph, self._numbers
        roots = {row: "main" for row, node in enumerate(graph.nodes) if node.parent == ROOT}
        rows: list[NodeRow] = graph.rows(roots)  # type: ignore[arg-type]
        for sample in cut_samples(rows, graph.token_ids, graph.logprobs):
            path = [numbers[row] for row in sample["nodes"] if row in numbers]
            yield Hole(tuple(path), has_default=True), sample

    def _choice(self, heard: Heard, asked: Asked, is_good: bool) -> dict[str, Any]:
        lacks = _lacks(heard)
        choice = {
            "message": heard.message,
            "finish_reason": heard.finish_reason,
            "token_ids": heard.token_ids,
            "logprobs": heard.logprobs,
            "lacks": lacks,
        }
        if is_good and not {"prompt_token_ids", "token_ids", "logprobs"} & set(lacks):
            self._numbers[self._hold(heard, _temperature(asked))] = asked.number
        return choice

    def _hold(self, heard: Heard, temperature: float) -> int:
        assert heard.prompt_ids is not None
        assert heard.token_ids is not None
        assert heard.logprobs is not None
        prompt = heard.prompt_ids
        parent, start = ROOT, 0
        for path, row in self._paths:
            if start < len(path) <= len(prompt) and prompt[: len(path)] == path:
                parent, start = row, len(path)
        parent = self._graph.add_context(parent, array("i", prompt[start:]))
        sampled = Sampled(
            array("i", heard.token_ids),
            array("f", heard.logprobs),
            _runs(heard),
            SamplingParams(max_tokens=len(heard.token_ids), temperature=temperature),
            heard.finish_reason,
            dialect="relay",
        )
        row = self._graph.add_sampled(parent, sampled)
        self._paths.append((prompt + heard.token_ids, row))
        return row


def _lacks(heard: Heard) -> list[str]:
    """What this record would need to be as exact as one of capture mode `tokens`."""
    ids, logprobs = heard.token_ids, heard.logprobs
    told = {
        "prompt_token_ids": heard.prompt_ids,
        "token_ids": ids,
        "logprobs": logprobs is not None and (ids is None or len(ids) == len(logprobs)),
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
    """As asked; 1 where it was left to the endpoint, as the APIs say."""
    try:
        settings = orjson.loads(joined([asked.request.settings])) if asked.request else {}
    except orjson.JSONDecodeError:  # a number that no float holds
        settings = {}
    temperature = settings.get("temperature")
    return float(temperature) if isinstance(temperature, int | float) else 1.0


def _is_good(call: RelayCall) -> bool:
    return call.state is CallState.WHOLE and call.status == 200 and call.is_delivered


def _messages(call: RelayCall) -> list[tuple[Piece, ...]]:
    """The history that a call was asked with, and its answer."""
    assert call.asked.request is not None
    history = call.asked.request.spot.messages()
    choices = hear(call.asked.route, call.lines, call.body)
    if not choices:
        return history
    message = choices[0].message
    said = message.get("output", [message])
    return [*history, *[cut(msgspec.json.encode(each)) for each in said]]
