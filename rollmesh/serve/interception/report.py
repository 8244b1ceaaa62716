"""What a sealed session says of itself: JSON in which rewards are put when it is asked for.

Made once, when the session is finished; from then on it stands for the session, of which nothing
else is kept. All but what lies in blobs anyway is one text, which is a blob too where it is long:
accounts that nobody asks for are the first to be spilled. Invariants: with the same rewards it is
the same each time; it is never joined, but told piece by piece. Made by the captures, driven by
book.py.

The samples of a finished session as plain lists, for the gateway's answers.

T is the number of tokens of one sample. Invariants: samples are those of the intake, as cut by
runtime/token_graph.py, so each sampled token has mask 1 in exactly one of them; void and superseded
turns train nowhere; rewards are put in later (account.py), since they may change. Driven by
tokens.py and relay/account.py.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from rollmesh.core.types import Branch, NodeRow, Outcome
from rollmesh.runtime.token_graph import reasons_of, sample_paths, temperature_of
from rollmesh.serve.interception.pieces import Piece, held, joined

NO_REWARDS: dict[int, float] = {}

_encode = msgspec.json.Encoder().encode


class SessionRewards(msgspec.Struct):
    """What was given so far."""

    whole: float | None = None
    """The session's."""
    by_node: dict[int, float] = NO_REWARDS
    """Of single sampled turns, by their node; the newest on a sample's path is the sample's."""


class RewardSlot(msgspec.Struct, frozen=True):
    """Where a reward is put."""

    path: tuple[int, ...]
    """Nodes, the newest last; its reward counts."""
    has_default: bool
    """Without one, the session's reward stands here."""

    def reward(self, rewards: SessionRewards) -> float | None:
        """What to put here."""
        given = (rewards.by_node[node] for node in reversed(self.path) if node in rewards.by_node)
        return next(given, rewards.whole if self.has_default else None)


class SessionReport(msgspec.Struct, frozen=True):
    """See the module. Made by a Writer."""

    session_id: str
    text: Piece
    inlets: list[tuple[int, RewardSlot | Piece]]
    """What is put into the text, and before which of its bytes, in order."""
    names: Piece
    """Nodes by the ids of their responses, a JSON object."""
    nodes: tuple[int, ...]
    """That a reward may be given to."""

    def told(self, rewards: SessionRewards, **fields: Any) -> list[Piece]:
        """Its JSON, which begins with these fields."""
        text = memoryview(joined([self.text]))
        pieces: list[Piece] = [_encode({"session_id": self.session_id, **fields})[:-1]]
        start = 0
        for stop, inlet in self.inlets:
            pieces.append(bytes(text[start:stop]))
            pieces.append(
                _encode(inlet.reward(rewards)) if isinstance(inlet, RewardSlot) else inlet
            )
            start = stop
        return [*pieces, bytes(text[start:]), b"}"]

    def node_of(self, name: int | str) -> int:
        """See CapturedSession."""
        if isinstance(name, int):
            if name not in self.nodes:
                raise LookupError(name)
            return name
        names: dict[str, int] = msgspec.json.decode(joined([self.names]))
        # Each dialect puts its own prefix before the ids that we make.
        return names[name[max(0, name.find(self.session_id)) :]]

    @property
    def num_bytes(self) -> int:
        """Beside the blobs."""
        return sum([len(each) for each in (self.text, self.names) if isinstance(each, bytes)])


class FinishedSession(msgspec.Struct, frozen=True):
    """What is left of a session once it is finished."""

    outcome: Outcome
    account: SessionReport
    forks: Mapping[str, int]
    healed: Mapping[str, int]
    fault: str
    spent_because: str


class ReportWriter:
    """Writes an account, field by field."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._inlets: list[tuple[int, RewardSlot | Piece]] = []

    def field(self, name: str, value: Any) -> None:
        """One whose value is short."""
        self._text += b",%b:%b" % (_encode(name), _encode(value))

    def ready(self, name: str, pieces: Iterable[Piece]) -> None:
        """One whose value is JSON already."""
        self._open(name, b"")
        self._put(pieces)

    def rows(self, name: str, rows: Iterable[tuple[RewardSlot, dict[str, Any]]]) -> None:
        """A list of objects, each of which gets a `reward`."""
        self._open(name, b"[")
        for number, (hole, row) in enumerate(rows):
            self._text += b',{"reward":' if number else b'{"reward":'
            self._inlets.append((len(self._text), hole))
            rest = _encode(row)
            self._text += b"," + rest[1:] if len(rest) > 2 else b"}"
        self._text += b"]"

    def listed(self, name: str, values: Iterable[Iterable[Piece]]) -> None:
        """A list of values that are JSON already."""
        self._open(name, b"[")
        for number, pieces in enumerate(values):
            self._text += b"," if number else b""
            self._put(pieces)
        self._text += b"]"

    def named(self, name: str, values: Iterable[tuple[str, Iterable[Piece]]]) -> None:
        """An object of values that are JSON already."""
        self._open(name, b"{")
        for number, (key, pieces) in enumerate(values):
            self._text += b"%b%b:" % (b"," if number else b"", _encode(key))
            self._put(pieces)
        self._text += b"}"

    def account(
        self, session_id: str, names: dict[str, int], nodes: Iterable[int]
    ) -> SessionReport:
        """What was written; for `names` and `nodes` see Account."""
        text = held(bytes(self._text))
        return SessionReport(session_id, text, self._inlets, held(_encode(names)), tuple(nodes))

    def _open(self, name: str, bracket: bytes) -> None:
        self._text += b",%b:%b" % (_encode(name), bracket)

    def _put(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, bytes):
                self._text += piece
            else:
                self._inlets.append((len(self._text), piece))


BRANCHES: tuple[Branch, ...] = get_args(Branch)


def cut_samples(
    nodes: Sequence[NodeRow],
    token_ids: "array[int]",
    logprobs: "array[float]",
) -> Iterator[dict[str, Any]]:
    """One JSON object for each sample, all branches, in the order of their last turns, made one by
    one, since of a long session each is large.

    `token_ids`, `loss_mask` (0 or 1), `logprobs` (0 where masked) and `policy_versions` (-1 where
    masked, or where the weights have none) are lists of length T; `nodes` are the rows of the path,
    and `sampling` is what the last of them was sampled with.
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
    """Sampled turns that train nowhere, and why: `void` or `superseded`."""
    reasons = reasons_of(nodes, BRANCHES)
    return [
        {"node": row, "num_tokens": node.num_tokens, "reason": reasons[row]}
        for row, node in enumerate(nodes)
        if node.sampled and node.num_tokens and reasons[row]
    ]


def _spans(nodes: Sequence[NodeRow], flat: Any, num_of: Any) -> list[list[Any]]:
    """Each row's part of a flat array."""
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
