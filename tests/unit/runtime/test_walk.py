"""What a walk keeps of a request, and that nothing of it is kept when its turn has begun."""

import asyncio
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from rollmesh.runtime.chat import Turn
from rollmesh.runtime.message_trie import Lookup, Match
from rollmesh.runtime.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.history_world import Held, array_turn
from tests.unit.runtime.session_world import MORE, SYSTEM, USER, Message, Say, open_session, said

NUM_WORDS = 10_000
LONG: Message = {"role": "user", "content": [{"type": "text", "text": "word " * NUM_WORDS}]}


def test_units_that_were_passed_are_let_go() -> None:
    held = Held()
    _, context = held.ask(array_turn(SYSTEM, USER))
    held.say(context, said("4"))
    match, _ = held.ask(array_turn(SYSTEM, USER, said("4"), MORE))
    lookup = match.lookup
    assert (lookup.num_units, lookup.units, lookup.pending) == (4, [msgspec.json.encode(MORE)], {})


def test_a_unit_that_cannot_be_read_is_named_by_its_place_in_the_array() -> None:
    held = Held()
    _, context = held.ask(array_turn(SYSTEM, USER))
    held.say(context, said("4"))
    bad: Message = {"role": "nobody"}
    for known in (1, 2):
        with pytest.raises(Exception, match=r"^messages\[4\]: unknown role 'nobody'"):
            held.ask(array_turn(SYSTEM, USER, said("4"), MORE, bad))
        assert held.ask(array_turn(SYSTEM, USER, said("4"), MORE))[0].is_held is (known == 2)


@pytest.mark.parametrize("is_array", [False, True])
async def test_nothing_of_a_request_is_held_while_its_turn_is_sampled(
    prompts: Prompts, say: Say, is_array: bool
) -> None:
    """In a session's first turn, in a thread for its length, and in one that extends it."""
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts, 10**6)
    history: list[Message] = [SYSTEM, LONG]
    for answer in ("4", "5"):
        units = [msgspec.json.encode(message) for message in history]
        kept = b"[%b]" % b",".join(units) if is_array else units[-1]
        asked = Turn(messages_raw=kept, messages=[]) if is_array else Turn(messages=units)
        with ThreadPoolExecutor() as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            (reply,) = await session.attach(asked)
        await asyncio.sleep(0)  # what it awaited stands on the loop's stack until it does
        reply.join()
        del asked, units
        gc.collect()
        num_references = sys.getrefcount(kept)
        assert num_references == 2
        assert not [each for each in gc.get_objects() if type(each) in (Lookup, Match)]
        sampler.generations[-1].end(*say(answer))
        session.finish(reply)
        session.delivered(reply)
        reply.leave()
        history += [said(answer), LONG]
