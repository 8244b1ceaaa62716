"""Guess the number: the rules, the hints, and where the reward comes from."""

import itertools
import math
from collections import Counter

import pytest

from rollmesh.core.errors import InfraError
from rollmesh.core.types import Task
from rollmesh.envs.env import Transcript
from rollmesh.envs.guess import GuessEnv
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint, ChatRequestSeen


async def play(secret: int, *answers: str) -> tuple[Transcript, list[ChatRequestSeen]]:
    env = GuessEnv()
    async with ChatEndpoint(answers) as server:
        transcript = await env.run(Task(f"guess-{secret}", {"secret": secret}), server.endpoint)
        await env.close()
    return transcript, server.requests


async def test_right_guess_ends_the_game_with_reward_one() -> None:
    transcript, requests = await play(5, "4", "5")
    assert transcript.data == {"guesses": [4, 5], "won": True}
    assert len(requests) == 2
    score = await GuessEnv().score(Task("guess-5"), transcript)
    assert (score.reward, score.metrics["num_guesses"]) == (1.0, 2.0)


async def test_whole_conversation_with_its_hints_is_sent_each_turn() -> None:
    transcript, requests = await play(5, "4", "6", "banana")
    contents = [message["content"] for message in requests[-1].body["messages"]]
    opening = "Guess my number from 1 to 7. You have 3 guesses."
    assert contents == [opening, "4", "higher", "6", "lower"]
    assert transcript.data == {"guesses": [4, 6, None], "won": False}
    score = await GuessEnv().score(Task("guess-5"), transcript)
    assert (score.reward, score.metrics["num_unparsed"]) == (0.0, 1.0)


async def test_unreadable_answer_counts_as_a_guess_and_gets_its_own_hint() -> None:
    _, requests = await play(5, "is it 3 or 4?", "8", "1")
    hints = [m["content"] for m in requests[-1].body["messages"] if m["role"] == "user"][1:]
    assert hints == ["say a number from 1 to 7"] * 2


async def test_a_failed_endpoint_is_not_a_lost_game() -> None:
    env = GuessEnv()
    async with ChatEndpoint([ChatAnswer(body=b"gibberish")]) as server:
        with pytest.raises(InfraError):
            await env.run(Task("guess-5", {"secret": 5}), server.endpoint)
        await env.close()


@pytest.mark.parametrize(
    ("text", "guess"),
    [("4", 4), ("7", 7), ("", None), ("0", None), ("8", None), ("04", None), ("1 2", None)]
    + [(text, None) for text in ("4.", " 4", "4\n", "I say 4!", "4\u0664", "\u0664", "-4")],
)
def test_an_answer_is_a_bare_number_in_range(text: str, guess: int | None) -> None:
    assert GuessEnv().parse(text) == guess


def test_very_long_number_is_unreadable() -> None:
    assert GuessEnv().parse("9" * 5000) is None


def test_tasks_are_balanced_reproducible_and_differ_by_split() -> None:
    env = GuessEnv()
    first = list(itertools.islice(env.tasks("train", 0), 70))
    assert Counter(task.data["secret"] for task in first) == dict.fromkeys(range(1, 8), 10)
    assert first == list(itertools.islice(env.tasks("train", 0), 70))
    assert first != list(itertools.islice(env.tasks("eval", 0), 70))
    assert {task.id for task in first} == {f"guess-{n}" for n in range(1, 8)}


def test_consistent_random_play_wins_about_68_percent() -> None:
    def win_share(low: int, high: int, secret: int, left: int) -> float:
        """Probability to win by guessing uniformly in low..high."""
        if left == 0:
            return 0.0
        shares = (
            1.0
            if guess == secret
            else win_share(guess + 1, high, secret, left - 1)
            if guess < secret
            else win_share(low, guess - 1, secret, left - 1)
            for guess in range(low, high + 1)
        )
        return math.fsum(shares) / (high - low + 1)

    assert sum(win_share(1, 7, secret, 3) for secret in range(1, 8)) / 7 == pytest.approx(
        0.68, abs=0.01
    )


def test_invalid_game_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="highest"):
        GuessEnv(highest=1)
