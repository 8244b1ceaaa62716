"""Answers by id, choices, retries, and equal requests that share answers."""

import contextlib
import gc
import weakref

import pytest

from rollmesh.core.errors import EngineRefused, SessionError
from rollmesh.core.types import EVAL_SAMPLING
from rollmesh.runtime.chat import RequestedSampling
from rollmesh.runtime.conversation.token_graph import reasons_of
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.replies import MAX_LISTED, Reply, ReplyState, failure_of
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import StopStrings
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.sampler import ScriptedGeneration, ScriptedSampler
from tests.unit.runtime.session_calls import (
    MORE,
    USER,
    ReplyIds,
    assistant,
    call,
    call_all,
    open_session,
    trained,
    turn,
    with_fields,
)


async def test_an_answer_is_found_by_the_name_of_its_reply_and_by_its_number(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler([reply_ids("4"), reply_ids("5")]), prompts)
    first, answer = await call(session, turn(USER))
    second, _ = await call(session, turn(USER, assistant(answer.content), MORE))
    for reply in (first, second):
        assert session.node_of(reply.head.id) == session.node_of(reply.node) == reply.node
    assert first.node != second.node


async def test_a_reply_without_an_answer_and_a_foreign_name_are_not_found(
    prompts: Prompts,
) -> None:
    session = open_session(ScriptedSampler(None), prompts)
    (waiting,) = await session.attach(turn(USER))
    own = session.session_id
    for name in (waiting.head.id, f"{own}-1", f"{own}--1", f"{own}-\u00b2", own, "", "s_other-0"):
        with pytest.raises(SessionError, match="not found"):
            session.node_of(name)


async def test_choices_are_siblings_of_one_context_with_their_own_seeds(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5"), reply_ids("6")])
    session = open_session(sampler, prompts)
    answered = await call_all(session, with_fields(turn(USER), num_choices=3))
    assert [answer.content for _, answer in answered] == ["4", "5", "6"]
    assert [reply.head.index for reply, _ in answered] == [0, 1, 2]
    assert len({reply.head.id for reply, _ in answered}) == 3
    assert len({request.params.seed for request in sampler.requests}) == 3
    assert trained(session) == [(0, False, "stop")] * 3


async def test_choices_with_a_client_seed_differ_too(prompts: Prompts, reply_ids: ReplyIds) -> None:
    sampler = ScriptedSampler(lambda _: reply_ids("4"))
    session = open_session(sampler, prompts, sampling=EVAL_SAMPLING)
    asked = with_fields(turn(USER), num_choices=2, sampling=RequestedSampling(seed=11))
    await call_all(session, asked)
    assert [request.params.seed for request in sampler.requests] == [11, 12]


async def test_a_marked_retry_gets_all_choices_again(prompts: Prompts, reply_ids: ReplyIds) -> None:
    session = open_session(ScriptedSampler([reply_ids("4"), reply_ids("5")]), prompts)
    asked = with_fields(turn(USER), num_choices=2)
    first = await call_all(session, asked)
    again = await call_all(session, with_fields(asked, is_retry=True))
    assert first == again
    assert session.num_calls == 2


async def test_a_history_continues_the_choice_that_it_contains(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5"), reply_ids("6")])
    session = open_session(sampler, prompts)
    await call_all(session, with_fields(turn(USER), num_choices=2))
    await call(session, turn(USER, assistant("4"), MORE))
    assert not session.fork_report().forks
    session.seal("done")
    assert [row.parent for row in session.record().nodes] == [-1, 0, 0, 1, 3]


async def test_a_failed_choice_fails_the_undelivered_others(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(None, GenerationSettings(max_fruitless_attempts=0))
    session = open_session(sampler, prompts)
    asked = with_fields(turn(USER), num_choices=3)
    replies = await session.attach(asked)
    sampler.generations[0].end(*reply_ids("4"))
    session.finish(replies[0])
    sampler.generations[1].fail("out of memory")
    sampler.generations[2].show(*reply_ids("6")[:1])
    again = await session.attach(asked)
    assert not set(again) & set(replies)
    assert [reply.state for reply in replies] == [ReplyState.VOID] * 3
    for generation in sampler.generations[3:]:
        generation.end(*reply_ids("7"))
    for reply in again:
        session.finish(reply)
        session.delivered(reply)
    assert [finish for _, _, finish in trained(session)] == ["void", "void", *["stop"] * 3]


async def test_five_resends_of_a_delivered_turn_train_once(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    """Codex does this when the end of a stream was lost: the same body, not marked as a retry."""
    answers = [reply_ids(str(n)) for n in range(7)]
    session = open_session(ScriptedSampler(answers), prompts)
    for _ in range(6):
        _, answer = await call(session, turn(USER))
    await call(session, turn(USER, assistant(answer.content), MORE))
    session.seal("done")
    nodes = session.record().nodes
    reasons = reasons_of(nodes, ["main"])
    trains = [
        n
        for n, (node, why) in enumerate(zip(nodes, reasons, strict=True))
        if node.sampled and not why
    ]
    assert len(trains) == 2
    assert reasons.count("superseded") == 5


async def test_a_delivered_turn_is_superseded_only_by_another_delivered_turn(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    for num_good in (0, 1):
        sampler = ScriptedSampler(None, GenerationSettings(max_fruitless_attempts=0))
        session = open_session(sampler, prompts)
        for is_good in [True, False, *[True] * num_good]:
            (reply,) = await session.attach(turn(USER))
            generation = sampler.generations[-1]
            generation.end(*reply_ids("4")) if is_good else generation.fail("out of memory")
            with contextlib.suppress(SessionError):
                session.finish(reply)
                session.delivered(reply)
        assert trained(session) == [(0, bool(num_good), "stop"), *[(0, False, "stop")] * num_good]


async def test_resends_of_a_cut_turn_resume_it(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    clock = FakeClock()
    sampler = ScriptedSampler(None, clock=clock)
    session = open_session(sampler, prompts)
    ids = [i for char in "I guess 4" for i in tokenizer.encode(char)] + [*reply_ids("")]
    seen = set()
    for n in range(5):
        (reply,) = await session.attach(turn(USER))
        seen.add(reply)
        reply.join()
        sampler.generations[0].show(ids[n])
        reply.leave()
    reply.join()
    sampler.generations[0].end(*ids[5:])
    assert session.finish(reply).content == "I guess 4"
    assert len(seen) == 1
    session.delivered(reply)
    assert len(trained(session)) == 1


async def test_a_cut_answer_sent_back_is_exact_context_and_does_not_train(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(None, GenerationSettings(max_fruitless_attempts=0))
    session = open_session(sampler, prompts)
    (cut,) = await session.attach(turn(USER))
    sampler.generations[0].show(*reply_ids("I guess")[:-1])
    sampler.generations[0].fail("lost", is_refused=True)
    with pytest.raises(SessionError):
        session.finish(cut)
    (reply,) = await session.attach(turn(USER, assistant("I guess")))
    before = [*sampler.requests[0].prompt_ids, *reply_ids("I guess")[:-1]]
    assert list(sampler.requests[1].prompt_ids)[: len(before)] == before
    sampler.generations[1].end(*reply_ids("4"))
    session.finish(reply)
    session.delivered(reply)
    assert not session.fork_report().forks
    assert [finish for _, _, finish in trained(session)] == ["void", "stop"]


@pytest.mark.parametrize(
    ("message", "is_full"),
    [
        ("The input (10271 tokens) is longer than the model's context length (4096 tokens).", True),
        ("Requested token count exceeds the model's maximum context length of 4096 tokens.", True),
        ("Could not decode image", False),
    ],
)
def test_a_context_filled_by_images_is_reported_as_a_full_context(
    message: str, is_full: bool
) -> None:
    """Only the engine counts image tokens; these are SGLang's messages."""
    failure = failure_of(EngineRefused(f"http://e: HTTP 400: {message}"))
    assert (failure.status, failure.code) == (
        400,
        "context_length_exceeded" if is_full else "engine_refused",
    )
    line = "This model's maximum context length is exceeded, as its engine says: http://e: "
    assert str(failure).startswith(line) == is_full
    assert str(failure).endswith(message)


async def test_a_repeated_answer_has_its_stop_string_and_alternatives_again(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(
        [reply_ids("go STOP")], new_matcher=lambda stops: StopStrings(stops, tokenizer.stream())
    )
    session = open_session(sampler, prompts)
    asked = with_fields(turn(USER), sampling=RequestedSampling(stop=("STOP",)))
    first, answer = await call(session, asked)
    shown = first.matched_stop, first.finish_reason, first.token_ids(), first.logprobs()
    again, same = await call(session, with_fields(asked, is_retry=True))
    assert (again.matched_stop, again.finish_reason, again.token_ids(), again.logprobs()) == shown
    assert (shown[0], same) == ("STOP", answer)


async def test_a_cut_answer_is_not_confused_with_a_whole_one_of_the_same_text(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(None, GenerationSettings(max_fruitless_attempts=0))
    session = open_session(sampler, prompts)
    (good,) = await session.attach(turn(USER))
    sampler.generations[0].end(*reply_ids("4"))
    session.finish(good)
    session.delivered(good)
    (cut,) = await session.attach(turn(USER))
    sampler.generations[1].show(*reply_ids("4")[:-1])
    sampler.generations[1].fail("lost", is_refused=True)
    with pytest.raises(SessionError):
        session.finish(cut)
    await session.attach(turn(USER, assistant("4"), MORE))
    before = [*sampler.requests[0].prompt_ids, *reply_ids("4")]
    assert list(sampler.requests[2].prompt_ids)[: len(before)] == before


async def test_a_session_whose_agent_left_for_good_is_idle(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    """Otherwise the session would never be forgotten: its last turn is void or was never
    fetched.
    """
    clock = FakeClock()
    sampler = ScriptedSampler(None, GenerationSettings(retry_window_s=30.0), clock)
    session = open_session(sampler, prompts)
    for asked in (USER, MORE):
        (reply,) = await session.attach(turn(asked))
        reply.join()
    assert [reply.is_ended for reply in session.sampling] == [False, False]
    sampler.generations[0].end(*reply_ids("4"))
    sampler.generations[1].show(*reply_ids("4")[:1])
    reply.leave()
    clock.advance(31.0)
    sampler.tick()
    assert [reply.is_ended for reply in session.sampling] == [True, True]


async def test_a_failure_does_not_retain_its_callers(prompts: Prompts) -> None:
    sampler = ScriptedSampler(None, GenerationSettings(max_fruitless_attempts=0))
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER))
    sampler.generations[0].fail("out of memory")

    def ask() -> "weakref.ref[FakeClock]":
        request = FakeClock()  # any object of the caller
        with contextlib.suppress(SessionError):
            session.finish(reply)
        return weakref.ref(request)

    assert ask()() is None
    with pytest.raises(SessionError, match="no engine made progress"):
        session.finish(reply)


async def test_aborted_calls_leave_nothing_after_their_retry_window(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    def num_replies() -> int:
        return sum([type(each) is Reply for each in gc.get_objects()])

    clock = FakeClock()
    sampler = ScriptedSampler(None, GenerationSettings(retry_window_s=30.0), clock)
    session = open_session(sampler, prompts)
    num_before = num_replies()
    for n in range(100):
        asked = turn({"role": "user", "content": str(n)})
        for reply in await session.attach(with_fields(asked, num_choices=1 + n % 2)):
            reply.join()
            sampler.generations[-1].show(*reply_ids("4")[: n % 2])
            reply.leave()
    del reply
    clock.advance(31.0)
    sampler.tick()
    await session.attach(turn(USER))
    assert num_replies() - num_before == 1


async def test_likeliest_tokens_are_kept_for_the_newest_replies_only(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler(), prompts)
    replies = []
    for n in range(MAX_LISTED + 1):
        (reply,) = await session.attach(turn({"role": "user", "content": str(n)}))
        generation = reply.generation
        assert isinstance(generation, ScriptedGeneration)
        generation.top_logprobs.append(((-0.5, 7),))
        generation.end(*reply_ids("4"))
        session.finish(reply)
        session.delivered(reply)
        replies.append(reply)
    assert [len(reply.top_logprobs()) for reply in replies] == [0, *[1] * MAX_LISTED]


async def test_the_same_body_attaches_while_it_is_undelivered(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (one,), (two,) = await session.attach(turn(USER)), await session.attach(turn(USER))
    assert one is two
    sampler.generations[0].end(*reply_ids("4"))
    assert session.finish(one) == session.finish(two)
    assert session.num_calls == 1


async def test_a_marked_retry_after_delivery_is_answered_again(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler([reply_ids("4")]), prompts)
    first, answer = await call(session, turn(USER))
    assert first.answer is None  # the answer is parsed again from its tokens
    again, same = await call(session, turn(USER, is_retry=True))
    assert again is first
    assert same == answer
    assert session.num_calls == 1


async def test_the_same_body_after_delivery_is_a_sibling_that_supersedes(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    await call(session, turn(USER))
    _, answer = await call(session, turn(USER))
    assert answer.content == "5"
    session.seal("done")
    rows = [(n.parent, n.superseded) for n in session.record().nodes if n.sampled]
    assert rows == [(0, True), (0, False)]
    assert sampler.requests[0].params.seed != sampler.requests[1].params.seed


async def test_a_repeated_request_is_sampled_after_the_same_tokens(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5"), reply_ids("4"), reply_ids("6")])
    session = open_session(sampler, prompts)
    for asked in (turn(USER), turn(USER, assistant("4"), MORE)) * 2:
        await call(session, asked)
    before, again = sampler.requests[1], sampler.requests[3]
    assert list(before.prompt_ids) == list(again.prompt_ids)
    session.seal("done")
    assert len([node for node in session.record().nodes if not node.sampled]) == 2
