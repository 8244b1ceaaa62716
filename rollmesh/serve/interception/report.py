"""Report of a finished session: JSON with slots for rewards, and the samples in it.

- A report replaces its session: nothing else of a finished session is kept.
- The text is one blob if it is long, so reports that are not requested are spilled to disk first.
- With the same rewards a report renders to the same bytes. It is rendered in pieces, never joined.
- Samples are cut by runtime/conversation/token_graph.py, as for training: each sampled token has
  loss mask 1 in exactly one sample; void and superseded turns are in none.

T is the number of tokens of a sample.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from rollmesh.core.types import Branch, NodeRow, Outcome
from rollmesh.runtime.conversation.token_graph import (
    reasons_of,
    sample_paths,
    temperature_of,
)
from rollmesh.serve.interception.pieces import Piece, held, joined

NO_REWARDS: dict[int, float] = {}

_encode = msgspec.json.Encoder().encode


class SessionRewards(msgspec.Struct):
    """Rewards given so far."""

    session: float | None = None
    """Reward of the whole session."""
    by_node: dict[int, float] = NO_REWARDS
    """Rewards of single sampled turns, by node; the newest on a sample's path is the sample's
    reward."""


class RewardSlot(msgspec.Struct, frozen=True):
    """Position in a report at which a sample's reward is inserted."""

    path: tuple[int, ...]
    """Nodes of the sample, the newest last; the newest reward counts."""
    has_default: bool
    """If no node has a reward, insert the session's."""

    def reward(self, rewards: SessionRewards) -> float | None:
        """Return the reward to insert."""
        given = (rewards.by_node[node] for node in reversed(self.path) if node in rewards.by_node)
        return next(given, rewards.session if self.has_default else None)


class SessionReport(msgspec.Struct, frozen=True):
    """The report of one session, built by a ReportWriter."""

    session_id: str
    text: Piece
    slots: list[tuple[int, RewardSlot | Piece]]
    """Inserted values with their byte offsets in the text, ascending."""
    names: Piece
    """JSON object that maps response ids to nodes."""
    nodes: tuple[int, ...]
    """Nodes that may be rewarded."""

    def render(self, rewards: SessionRewards, **fields: Any) -> list[Piece]:
        """Render the report as JSON that starts with `fields`."""
        text = memoryview(joined([self.text]))
        pieces: list[Piece] = [_encode({"session_id": self.session_id, **fields})[:-1]]
        start = 0
        for stop, slot in self.slots:
            pieces.append(bytes(text[start:stop]))
            pieces.append(_encode(slot.reward(rewards)) if isinstance(slot, RewardSlot) else slot)
            start = stop
        return [*pieces, bytes(text[start:]), b"}"]

    def node_of(self, name: int | str) -> int:
        """Return the node of a number or a response id; LookupError if there is none."""
        if isinstance(name, int):
            if name not in self.nodes:
                raise LookupError(name)
            return name
        names: dict[str, int] = msgspec.json.decode(joined([self.names]))
        # Each dialect puts its own prefix before the response ids.
        return names[name[max(0, name.find(self.session_id)) :]]

    @property
    def num_bytes(self) -> int:
        """Bytes held outside of blobs."""
        return sum([len(each) for each in (self.text, self.names) if isinstance(each, bytes)])


class FinishedSession(msgspec.Struct, frozen=True):
    """The remains of a finished session."""

    outcome: Outcome
    report: SessionReport
    forks: Mapping[str, int]
    healed: Mapping[str, int]
    fault: str
    spent_because: str


class ReportWriter:
    """Builds a report field by field."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._slots: list[tuple[int, RewardSlot | Piece]] = []

    def field(self, name: str, value: Any) -> None:
        """Add a short value."""
        self._text += b",%b:%b" % (_encode(name), _encode(value))

    def ready(self, name: str, pieces: Iterable[Piece]) -> None:
        """Add a value that is encoded as JSON already."""
        self._open(name, b"")
        self._put(pieces)

    def rows(self, name: str, rows: Iterable[tuple[RewardSlot, dict[str, Any]]]) -> None:
        """Add a list of objects, each with a `reward` slot."""
        self._open(name, b"[")
        for number, (hole, row) in enumerate(rows):
            self._text += b',{"reward":' if number else b'{"reward":'
            self._slots.append((len(self._text), hole))
            rest = _encode(row)
            self._text += b"," + rest[1:] if len(rest) > 2 else b"}"
        self._text += b"]"

    def listed(self, name: str, values: Iterable[Iterable[Piece]]) -> None:
        """Add a list of values that are encoded as JSON already."""
        self._open(name, b"[")
        for number, pieces in enumerate(values):
            self._text += b"," if number else b""
            self._put(pieces)
        self._text += b"]"

    def named(self, name: str, values: Iterable[tuple[str, Iterable[Piece]]]) -> None:
        """Add an object of values that are encoded as JSON already."""
        self._open(name, b"{")
        for number, (key, pieces) in enumerate(values):
            self._text += b"%b%b:" % (b"," if number else b"", _encode(key))
            self._put(pieces)
        self._text += b"}"

    def build(self, session_id: str, names: dict[str, int], nodes: Iterable[int]) -> SessionReport:
        """Build the report; `names` and `nodes` are those of SessionReport."""
        text = held(bytes(self._text))
        return SessionReport(session_id, text, self._slots, held(_encode(names)), tuple(nodes))

    def _open(self, name: str, bracket: bytes) -> None:
        self._text += b",%b:%b" % (_encode(name), bracket)

    def _put(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, bytes):
                self._text += piece
            else:
                self._slots.append((len(self._text), piece))


BRANCHES: tuple[Branch, ...] = get_args(Branch)


def cut_samples(
    nodes: Sequence[NodeRow],
    token_ids: "array[int]",
    logprobs: "array[float]",
) -> Iterator[dict[str, Any]]:
    """Yield one JSON object per sample of any branch, in the order of the samples' last turns.

    `token_ids`, `loss_mask` (0 or 1), `logprobs` (0 where masked) and `policy_versions` (-1 where
    masked or unknown) are lists of length T. `nodes` are the rows of the path, and `sampling` holds
    the parameters of the last one. Samples are yielded singly, because those of a long session are
    large.
    """
    ids_of = _spans(nodes, token_ids, lambda node: node.num_tokens)
    logprobs_of = _spans(nodes, logprobs, lambda node: node.num_tokens if node.sampled else 0)
    trains = [not reason for reason in reasons_of(nodes, BRANCHES)]
    for claim in sample_paths(nodes, trains):
        last = nodes[claim.path[-1]]
        sample: dict[str, Any] = {
            "token_ids": [],
            "logprobs": [],
            "loss_mask": [],
            "policy_versions": [],
            "branch": last.branch,
            "temperature": temperature_of(last),
            "sampling": last.params,
            "nodes": claim.path,
        }
        for row in claim.path:
            num_tokens, is_trained = nodes[row].num_tokens, row in claim.trained
            zeros = [0] * num_tokens
            sample["token_ids"] += ids_of[row]
            sample["logprobs"] += logprobs_of[row] if is_trained else zeros
            sample["loss_mask"] += [1] * num_tokens if is_trained else zeros
            sample["policy_versions"] += _versions(nodes[row]) if is_trained else [-1] * num_tokens
        yield sample


def unused_turns(nodes: Sequence[NodeRow]) -> list[dict[str, Any]]:
    """Return the sampled turns that are in no sample, with the reason: `void` or `superseded`."""
    reasons = reasons_of(nodes, BRANCHES)
    return [
        {"node": row, "num_tokens": node.num_tokens, "reason": reasons[row]}
        for row, node in enumerate(nodes)
        if node.sampled and node.num_tokens and reasons[row]
    ]


def _spans(nodes: Sequence[NodeRow], flat: Any, num_of: Any) -> list[list[Any]]:
    """Split a flat array by rows."""
    spans, at = [], 0
    for node in nodes:
        end = at + num_of(node)
        spans.append(flat[at:end].tolist())
        at = end
    return spans


def _versions(node: NodeRow) -> list[int]:
    versions: list[int] = []
    for run in node.policy_versions:
        versions += [run.policy_version] * run.num_tokens
    return versions
