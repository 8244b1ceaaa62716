"""Calls, retries and the end of a session, with scripted generations."""

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import (
    EVAL_SAMPLING,
    FieldPolicy,
    OutputGrammar,
    SamplingPolicy,
    SamplingRule,
)
from rollmesh.runtime.chat import RequestedSampling
from rollmesh.runtime.conversation.forks import ForkCause
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.replies import Reply
from rollmesh.runtime.session import OFF_LOOP_BYTES, Session
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.sampler import ScriptedSampler, logprob_at
from tests.unit.runtime.session_calls import (
    MORE,
    TO_THE_END,
    TOOLS,
    USER,
    Message,
    ReplyIds,
    assistant,
    call,
    open_session,
    trained,
    turn,
    with_fields,
)


async def test_the_next_prompt_is_the_exact_earlier_tokens_and_the_new_message(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    # Sampled letter by letter, which no tokenizer would produce.
    letters = [i for char in "I guess 4" for i in tokenizer.encode(char)] + [*reply_ids("")]
    assert letters != reply_ids("I guess 4")
    sampler = ScriptedSampler([letters, reply_ids("5")])
    session = open_session(sampler, prompts)
    first, answer = await call(session, turn(USER))
    await call(session, turn(USER, assistant(answer.content), MORE))
    before, after = (list(request.prompt_ids) for request in sampler.requests)
    assert after[: len(before) + len(letters)] == before + letters
    rest = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(after[len(before) + len(letters) :]) == rest
    assert first.finish_reason == "stop"


async def test_a_request_that_ends_with_an_answer_does_not_change_the_next_prompt(
    prompts: Prompts, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5"), reply_ids("6")])
    session = open_session(sampler, prompts)
    await call(session, turn(USER))
    await call(session, turn(USER, assistant("4")))
    await call(session, turn(USER, assistant("4"), MORE))
    first, _, last = (list(request.prompt_ids) for request in sampler.requests)
    rest = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(last) == tokenizer.decode([*first, *reply_ids("4")]) + rest
    assert last[: len(first)] == first
    # The agent dropped the answer, which is a rewind; nothing was rendered again.
    assert [row.cause for row in session.fork_report().forks] == [ForkCause.REWOUND]


async def test_the_record_has_each_token_once_with_its_logprob(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    await call(session, turn(USER))
    await call(session, turn(USER, assistant("4"), MORE))
    session.seal("done")
    record = session.record()
    assert [(n.parent, n.sampled, n.branch) for n in record.nodes] == [
        (-1, False, "main"),
        (0, True, "main"),
        (1, False, "main"),
        (2, True, "main"),
    ]
    ids = array("i", bytes(record.token_ids))
    assert list(ids) == [*sampler.requests[1].prompt_ids, *reply_ids("5")]
    expected = [logprob_at(n) for text in ("4", "5") for n in range(len(reply_ids(text)))]
    assert list(array("f", bytes(record.logprobs))) == expected
    assert (record.num_calls, record.num_forks) == (2, 0)
    shown = msgspec.json.decode(record.messages)
    assert [message["content"] for message in shown] == ["guess", "4", "higher", "5"]


async def test_the_record_has_the_engine_and_api_of_each_turn(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler([reply_ids("4"), reply_ids("5")])
    session = open_session(sampler, prompts)
    await call(session, with_fields(turn(USER), dialect="messages"))
    sampler.engine = "http://other"
    await call(session, with_fields(turn(USER, assistant("4"), MORE), dialect="responses"))
    session.seal("done")
    record = session.record()
    turns = [node for node in record.nodes if node.sampled]
    assert record.engines == ["http://scripted", "http://other"]
    assert [[run.engine for run in node.policy_versions] for node in turns] == [[0], [1]]
    assert [node.dialect for node in record.nodes] == ["", "messages", "", "responses"]


async def test_a_returning_reader_resumes_its_parked_generation(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER))
    reply.join()
    generation = sampler.generations[0]
    generation.show(*reply_ids("4")[:1])
    reply.leave()
    assert generation.num_aborts == 1
    (again,) = await session.attach(turn(USER))
    assert again is reply
    again.join()
    assert generation.attempt is not None
    generation.end(*reply_ids("4")[1:])
    assert session.finish(again).content == "4"
    assert list(again.token_ids()) == list(reply_ids("4"))
    again.leave()


async def test_an_abandoned_generation_is_void(prompts: Prompts, reply_ids: ReplyIds) -> None:
    clock = FakeClock()
    sampler = ScriptedSampler(None, GenerationSettings(retry_window_s=30.0), clock)
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER))
    reply.join()
    sampler.generations[0].show(*reply_ids("4")[:1])
    reply.leave()
    clock.advance(31.0)
    sampler.tick()
    (another,) = await session.attach(turn(USER))
    assert another is not reply
    sampler.generations[1].end(*reply_ids("5"))
    session.finish(another)
    session.delivered(another)
    session.seal("done")
    rows = [(n.finish_reason, n.num_tokens) for n in session.record().nodes if n.sampled]
    assert rows == [("void", 1), ("stop", len(reply_ids("5")))]


async def test_sealing_wakes_every_waiter_with_410(prompts: Prompts) -> None:
    session = open_session(ScriptedSampler(), prompts)
    (reply,) = await session.attach(turn(USER))
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(_status_at_the_end(session, reply)) for _ in range(2)]
        group.create_task(_seal(session))
    assert [task.result() for task in waiting] == [410, 410]
    with pytest.raises(SessionError, match="the rollout ended") as caught:
        await session.attach(turn(USER))
    assert caught.value.status == 410


async def _status_at_the_end(session: Session, reply: Reply) -> int:
    await reply.wait(TO_THE_END)
    with pytest.raises(SessionError) as caught:
        session.finish(reply)
    return caught.value.status


async def _seal(session: Session) -> None:
    session.seal("the rollout ended")


async def test_an_undelivered_answer_is_void(prompts: Prompts, reply_ids: ReplyIds) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (finished,) = await session.attach(turn(USER))
    sampler.generations[0].end(*reply_ids("4"))
    session.finish(finished)
    await session.attach(turn(USER, assistant("4"), MORE))
    sampler.generations[1].show(*reply_ids("5")[:1])
    session.seal("the rollout ended")
    rows = [n.finish_reason for n in session.record().nodes if n.sampled]
    assert rows == ["void", "void"]


@pytest.mark.parametrize(("is_refused", "status"), [(True, 400), (False, 503)])
async def test_a_failed_generation_returns_its_status_and_a_retry_starts_again(
    prompts: Prompts, reply_ids: ReplyIds, is_refused: bool, status: int
) -> None:
    settings = GenerationSettings(max_fruitless_attempts=0)
    sampler = ScriptedSampler(None, settings)
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER))
    sampler.generations[0].fail("no", is_refused)
    with pytest.raises(SessionError) as caught:
        session.finish(reply)
    assert caught.value.status == status
    assert (caught.value.retry_after_s is not None) == (status == 503)
    (another,) = await session.attach(turn(USER, is_retry=True))
    sampler.generations[1].end(*reply_ids("4"))
    assert session.finish(another).content == "4"


@pytest.mark.parametrize(("is_refused", "status"), [(True, 400), (False, 503)])
async def test_the_error_of_a_failed_call_survives_another_call(
    prompts: Prompts, reply_ids: ReplyIds, is_refused: bool, status: int
) -> None:
    sampler = ScriptedSampler(None, GenerationSettings(max_fruitless_attempts=0))
    session = open_session(sampler, prompts)
    readers = [(await session.attach(turn(USER)))[0] for _ in range(2)]
    sampler.generations[0].fail("out of memory", is_refused)
    await session.attach(turn(MORE))  # The call arrives before the readers are woken.
    for reader in readers:
        with pytest.raises(SessionError) as caught:
            session.finish(reader)
        assert caught.value.status == status
    assert bool(session.engine_fault) == (not is_refused)


async def test_a_prompt_that_fills_the_context_is_refused_with_openais_message(
    prompts: Prompts,
) -> None:
    session = open_session(ScriptedSampler(), prompts, max_context_tokens=4)
    with pytest.raises(SessionError, match="This model's maximum context length is 4") as caught:
        await session.attach(turn(USER))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_long_text_is_tokenised_off_the_loop_and_then_matched(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(lambda _: reply_ids("4"))
    session = open_session(sampler, prompts, max_context_tokens=100_000)
    long = turn({"role": "user", "content": "x " * OFF_LOOP_BYTES})
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(session.attach(long)) for _ in range(3)]
    assert len({id(task.result()[0]) for task in calls}) == 1
    assert session.num_calls == 1
    session.seal("done")
    assert [n.parent for n in session.record().nodes] == [-1, 0]


class CountedPrompts(Prompts):
    """Count the chats that are rendered completely."""

    num_first = 0

    def first(self, chat: Chat) -> "array[int]":
        self.num_first += 1
        return super().first(chat)


async def test_a_long_first_text_is_rendered_once(
    model_folder: Path, tokenizer: Tokenizer, reply_ids: ReplyIds
) -> None:
    prompts = CountedPrompts(choose_family(model_folder, "auto", tokenizer), tokenizer)
    session = open_session(ScriptedSampler([reply_ids("4")]), prompts, max_context_tokens=100_000)
    await call(session, turn({"role": "user", "content": "x " * OFF_LOOP_BYTES}))
    assert prompts.num_first == 1


async def test_an_edited_history_forks_and_is_reported(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler(lambda _: reply_ids("4")), prompts)
    await call(session, turn(USER))
    await call(session, turn(USER, assistant("7"), MORE))
    assert [row.cause for row in session.fork_report().forks] == [ForkCause.EDITED]
    session.seal("done")
    assert [n.parent for n in session.record().nodes] == [-1, 0, -1, 2]


async def test_a_single_call_without_tools_is_a_side_branch(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler(lambda _: reply_ids("4")), prompts)
    title = turn({"role": "system", "content": "make a title"}, USER)
    await call(session, title)
    await call(session, turn(USER, tools=TOOLS))
    await call(session, turn(USER, assistant("4"), MORE, tools=TOOLS))
    session.seal("done")
    assert [n.branch for n in session.record().nodes] == ["side"] * 2 + ["main"] * 4


async def test_tool_calls_are_matched_by_id_in_the_next_request(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    markup = '<tool_call>\n{"name": "f", "arguments": {"a":   1}}\n</tool_call>'
    sampler = ScriptedSampler([reply_ids(markup), reply_ids("done")])
    session = open_session(sampler, prompts)
    reply, answer = await call(session, turn(USER, tools=TOOLS))
    assert reply.finish_reason == "tool_calls"
    (made,) = answer.tool_calls
    function = {"name": "f", "arguments": '{"a":1}'}
    echo: Message = {
        "role": "assistant",
        "tool_calls": [{"id": made.id, "function": function}],
    }
    result: Message = {"role": "tool", "tool_call_id": made.id, "content": "42"}
    await call(session, turn(USER, echo, result, tools=TOOLS))
    prompt = list(sampler.requests[1].prompt_ids)
    start = len(sampler.requests[0].prompt_ids)
    assert prompt[start : start + len(reply_ids(markup))] == list(reply_ids(markup))
    assert not session.fork_report().forks


async def test_a_stop_string_ends_the_text_and_its_tokens_are_kept(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler([reply_ids("go Observation: x")]), prompts)
    asked = turn(USER)
    asked = msgspec.structs.replace(asked, sampling=RequestedSampling(stop=("Observation:",)))
    reply, answer = await call(session, asked)
    assert answer.content == "go"
    assert list(reply.token_ids()) == list(reply_ids("go Observation: x"))


async def test_a_stop_string_in_the_reasoning_ends_it_too(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    session = open_session(ScriptedSampler([reply_ids("<think>hm STOP")]), prompts)
    asked = msgspec.structs.replace(turn(USER), sampling=RequestedSampling(stop=("STOP",)))
    _, answer = await call(session, asked)
    assert (answer.content, answer.reasoning) == ("", "hm")


async def test_a_session_never_returns_to_older_weights(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler(lambda _: reply_ids("4"))
    sampler.policy_version = 5
    session = open_session(sampler, prompts)
    await call(session, turn(USER))
    await call(session, turn(USER, assistant("4"), MORE))
    assert [request.min_policy_version for request in sampler.requests] == [-1, 5]


async def test_a_truncated_call_is_not_the_finish_reason(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER, tools=TOOLS))
    reply.join()
    sampled = tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {"a": "lo')
    sampler.generations[0].end(*sampled, reason="length")
    answer = session.finish(reply)
    assert [call.arguments for call in answer.tool_calls] == ['{"a": "lo']
    assert reply.finish_reason == "length"


async def test_settings_that_the_policy_overrides_are_in_the_params_and_reported(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    grammar = OutputGrammar("regex", "[0-9]")
    ask = RequestedSampling(temperature=0.0, min_p=0.1, logit_bias=((5, -1.0),), grammar=grammar)
    asked = with_fields(turn(USER), sampling=ask)
    sampler = ScriptedSampler(lambda _: reply_ids("4"))
    reply, _ = await call(open_session(sampler, prompts), asked)
    params = reply.head.params
    assert (params.temperature, params.min_p, params.logit_bias) == (1.0, 0.0, ())
    assert params.grammar == grammar
    assert reply.head.forced == ("temperature", "min_p", "logit_bias")
    free, _ = await call(open_session(sampler, prompts, sampling=EVAL_SAMPLING), asked)
    assert (free.head.params.min_p, free.head.params.logit_bias) == (0.1, ((5, -1.0),))
    assert free.head.forced == ()
    strict = SamplingPolicy(grammar=SamplingRule(FieldPolicy.FORCE))
    bound, _ = await call(open_session(sampler, prompts, sampling=strict), asked)
    assert bound.head.params.grammar is None


async def test_a_bias_on_a_token_outside_the_vocabulary_is_refused(prompts: Prompts) -> None:
    ask = RequestedSampling(logit_bias=((10**9, 1.0),))
    with pytest.raises(SessionError, match="logit_bias: expected token ids"):
        await open_session(ScriptedSampler(), prompts).attach(with_fields(turn(USER), sampling=ask))


async def test_a_session_that_ends_early_refuses_new_calls_and_finishes_running_ones(
    prompts: Prompts, reply_ids: ReplyIds
) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER))
    reply.join()
    session.end_early("too large")
    session.end_early("something else")
    with pytest.raises(SessionError, match="too large") as caught:
        await session.attach(turn(MORE))
    assert (caught.value.status, caught.value.code) == (400, "session_over_limit")
    assert (await session.attach(turn(USER)))[0] is reply  # a repetition of the same call
    sampler.generations[0].end(*reply_ids("4"))
    assert session.finish(reply).content == "4"
    session.delivered(reply)
    assert trained(session) == [(0, False, "stop")]


async def test_a_session_that_ended_early_is_not_opened_again(
    prompts: Prompts,
) -> None:
    session = open_session(ScriptedSampler(), prompts)
    session.end_early("too large")
    session.seal("done")
    session.end_early("something else")
    session.reopen()
    with pytest.raises(SessionError, match="too large"):
        await session.attach(turn(USER))
