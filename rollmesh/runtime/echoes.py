"""Which running turn an agent asks for by showing back what it saw of it.

Codex puts every item that a stalled stream had finished into its next request, once for each time
that it saw it; asked anew behind that echo, the turn would be sampled in a context that no agent
means. Invariant: only finished parts count, since a text that may go on is what a prefill looks
like, and only a turn that was not handed over is given again. Pure; driven by session.py.
"""

from collections.abc import Callable, Iterable

from rollmesh.runtime.chat import ChatMessage
from rollmesh.runtime.deltas import Answer
from rollmesh.runtime.holdings import Prompt
from rollmesh.runtime.reply import Reply, ReplyState
from rollmesh.runtime.turns import Turn


def find_shown(
    turn: Turn,
    prompt: Prompt,
    asked: Iterable[tuple[Reply, ...]],
    parse: Callable[[Reply], Answer],
) -> tuple[Reply, ...] | None:
    """The replies among `asked` that `turn` shows the beginning of; `parse` reads one so far."""
    match = prompt.match
    if match is None or not match.new or match.new[-1].role != "assistant":
        return None
    if match.spot.depth + len(match.new) != match.deepest.depth + 1:
        return None
    return next(
        (
            replies
            for replies in asked
            if len(replies) == 1
            and _answers(replies[0], turn, prompt)
            and _is_begin(match.new[-1], parse(replies[0]), replies[0].is_ended)
        ),
        None,
    )


def _answers(reply: Reply, turn: Turn, prompt: Prompt) -> bool:
    """Whether it is an open answer to the same history, asked for in the same way."""
    assert prompt.match is not None
    is_open = reply.state is ReplyState.COMMITTED or (
        reply.state is ReplyState.SAMPLING and reply.is_running
    )
    return (
        is_open
        and reply.source.context is prompt.match.deepest.asked()
        and reply.head.ask == turn.ask
        and reply.head.reads_calls == turn.reads_calls
        and turn.num_choices == 1
    )


def _is_begin(shown: ChatMessage, answer: Answer, is_ended: bool) -> bool:
    """Whether `shown` is what is finished of `answer`, however often it was seen."""
    if shown.tool_calls:
        return False
    reasoning, text = str(shown.reasoning_content or "").strip(), shown.text().strip()
    is_text_whole = is_ended or bool(answer.tool_calls)
    return (
        bool(reasoning or text)
        and _repeats(reasoning, answer.reasoning.strip())
        and (not text or (is_text_whole and _repeats(text, answer.content.strip())))
    )


def _repeats(shown: str, once: str) -> bool:
    """Whether it is nothing but `once`, again and again."""
    while once and shown.startswith(once):
        shown = shown[len(once) :].strip()
    return not shown
