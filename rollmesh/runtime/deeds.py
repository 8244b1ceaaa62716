"""What a session did, in words that outlive its process: enough to make it again, token by token.

    attach --Asked--> ... --Sampled--> finish --written--> the last byte leaves
    a limit, an engine's fault --Noted-->      an answer that nobody took --Untaken-->

Owns the words, and how a call becomes some. Invariants: a deed names spots and nodes by their
numbers, so deeds are done again in the order in which they were put, all of them up to some point;
tokens are those that the engine was given and gave, nothing is rendered or tokenised again; what is
put is on disk once `written` returns, and a call's last byte leaves behind that. Made by
session.py, done again by redo.py, written by whoever is the session's scribe.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from rollmesh.core.types import DialectName, SamplingParams, VersionRun
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.graph import ROOT, Sampled
from rollmesh.runtime.holdings import Holdings, Prompt
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.keys import unit_key
from rollmesh.runtime.match import Match
from rollmesh.runtime.openings import UnitEnd
from rollmesh.runtime.reply import Reply, number_of
from rollmesh.runtime.spot import NO_NUMBER, Spot
from rollmesh.runtime.turns import SamplingAsk, Turn

Text = bytes | int
"""A text, or the number under which a long one is kept."""


class Deed(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Something that a session did."""


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """An image that a session was shown for the first time."""

    digest: str
    address: str | int
    """Where it is, or the number under which it is kept."""


class Way(msgspec.Struct, frozen=True, array_like=True):
    """A unit whose bytes were new and whose meaning was not: from one spot it leads to another."""

    start: int
    key: int
    end: int


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """New messages behind what was held; spots by their numbers, -1 is the root of its tools."""

    spot: int
    deepest: int
    is_held: bool
    messages: tuple[Text, ...] = ()
    ends: tuple[UnitEnd, ...] = ()
    ways: tuple[Way, ...] = ()
    images: tuple[Shown, ...] = ()
    healed: dict[str, int] = {}
    """Differences that were seen past, by kind."""
    cause: str = ""
    """Of a fork, where it was known before the history was asked."""


class Raw(msgspec.Struct, frozen=True, array_like=True, tag="raw"):
    """A raw prompt; its text is what follows the text of the answer that it goes on from."""

    text: Text | None


class Again(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """What a held spot ends, once more; a raw prompt's is known by its node alone."""

    spot: int
    node: int


class Asked(Deed, frozen=True, tag="asked"):
    """A call began: what was new in its prompt, and what its choices are sampled with."""

    call: int
    """Number of its first choice."""
    digest: int
    place: Chat | Raw | Again
    parent: int
    """The node that its new tokens follow."""
    token_ids: bytes
    """Int32."""
    lead: tuple[int, ...]
    tools: Text
    params: tuple[SamplingParams, ...]
    ask: SamplingAsk
    created_s: int
    reads_calls: bool
    is_raw: bool
    dialect: DialectName


class Answered(Deed, frozen=True, tag="answered"):
    """A choice came to its end, good or `void`; void without tokens, it has no node."""

    call: int
    token_ids: bytes
    logprobs: bytes
    """Float32."""
    policy_versions: tuple[VersionRun, ...]
    engines: tuple[str, ...]
    finish_reason: str
    matched_stop: str | None = None
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()


class Untaken(Deed, frozen=True, tag="untaken"):
    """The last byte of a choice was not handed over (True), or was after all (False)."""

    call: int
    is_untaken: bool


class Noted(Deed, frozen=True, tag="noted"):
    """Why its newest call got no answer ('' for it did), and what limit ended it."""

    engine_fault: str
    spent_because: str


AnyDeed = Asked | Answered | Untaken | Noted


class Scribe(Protocol):
    """Writes down what one session does."""

    def check(self) -> None:
        """SessionError 503 or 507 while nothing more can be written."""

    def text(self, text: bytes | Blob) -> Text:
        """How a deed names a text that may be long."""

    def same(self, text: bytes) -> Text:
        """How a deed names a text that comes again and again."""

    def image(self, image: ImageRef) -> Shown | None:
        """How a deed tells an image; None where one did before."""

    def put(self, deed: AnyDeed) -> None:
        """It is done, and written with what is due next."""

    def be_due(self) -> None:
        """What was put is to be written soon, if the disk takes it; nobody waits."""

    async def written(self) -> None:
        """Until all that was put is written; SessionError 507 where the disk does not take it."""


class Telling:
    """Around the begin of a call, to see what holding its prompt changed."""

    def __init__(self, scribe: Scribe, held: Holdings) -> None:
        self.scribe = scribe
        self.held = held
        self._healed = dict(held.fork_log.healed) if held.fork_log else {}
        """Before."""

    def healed(self) -> dict[str, int]:
        """What was seen past, by kind."""
        now = self.held.fork_log.healed if self.held.fork_log else {}
        before = self._healed
        return {kind: n - before.get(kind, 0) for kind, n in now.items() if n != before.get(kind)}

    def shown(self, images: Iterable[ImageRef]) -> tuple[Shown, ...]:
        """Those of `images` that no deed has told yet."""
        told = (self.scribe.image(image) for image in images)
        return tuple([each for each in told if each is not None])


def asked(turn: Turn, prompt: Prompt, replies: Sequence[Reply], told: Telling) -> Asked:
    """The deed of a call whose `prompt` is held by now."""
    head, source = replies[0].head, replies[0].source
    new_ids = (
        prompt.token_ids if prompt.line is None else told.held.graph.ids_of(source.context.node)
    )
    return Asked(
        call=number_of(replies[0]),
        digest=source.digest,
        place=_place_of(turn, prompt, source.context, told),
        parent=prompt.parent if prompt.line is None else ROOT,
        token_ids=_bytes_of("i", new_ids),
        lead=source.lead,
        tools=told.scribe.same(source.tools),
        params=tuple([reply.head.params for reply in replies]),
        ask=head.ask,
        created_s=head.created_s,
        reads_calls=head.reads_calls,
        is_raw=source.is_raw,
        dialect=head.dialect,
    )


def answered(reply: Reply, sampled: Sampled) -> Answered:
    """The deed of a choice that has come to its end, and is in the graph."""
    top = reply.top_logprobs()
    return Answered(
        call=number_of(reply),
        token_ids=_bytes_of("i", sampled.token_ids),
        logprobs=_bytes_of("f", sampled.logprobs),
        policy_versions=sampled.policy_versions,
        engines=tuple(sampled.engines),
        finish_reason=sampled.finish_reason,
        matched_stop=reply.matched_stop,
        top_logprobs=tuple(top) if top else (),
    )


def _bytes_of(kind: Literal["i", "f"], values: Sequence[float]) -> bytes:
    """Of int32 or float32, which these are mostly already."""
    return (values if isinstance(values, array) else array(kind, values)).tobytes()


def _place_of(turn: Turn, prompt: Prompt, context: Spot, told: Telling) -> Chat | Raw | Again:
    if prompt.line is not None:
        return Chat(
            NO_NUMBER,
            NO_NUMBER,
            is_held=False,
            messages=tuple([told.scribe.text(raw) for raw in prompt.line.raws]),
            ends=prompt.line.ends,
            images=told.shown(prompt.line.images.values()),
        )
    if prompt.match is not None:
        return _chat_of(prompt, prompt.match, told)
    if prompt.raw is None or prompt.parent == context.node:
        told.held.history.catch_up()  # a spot is numbered then
        return Again(context.number, context.node)
    if turn.prompt_text is None:
        return Raw(None)
    return Raw(told.scribe.text(turn.prompt_text[prompt.raw.num_chars :].encode()))


def _chat_of(prompt: Prompt, match: Match, told: Telling) -> Chat:
    ways = [
        Way(alias.start.number, unit_key(alias.unit), alias.spot.number)
        for alias in match.walk.aliases
    ]
    images = [image for m in match.new if isinstance(m.content, list) for image in m.images()]
    return Chat(
        match.spot.number,
        match.deepest.number,
        match.is_held,
        messages=tuple([told.scribe.text(raw) for raw in match.raws]),
        ends=() if match.is_held else match.unit_ends(),
        ways=tuple(ways),
        images=told.shown(images),
        healed=told.healed() if ways else {},
        cause=prompt.cause or "",
    )
