"""Gymnasium's environments as conversations: observations as text, actions, and rewards."""

import itertools
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, Text

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Transcript
from rollmesh.envs.gym import GymEnv
from rollmesh.envs.loading import load_env
from rollmesh.testing.upstreams import ChatEndpoint

TASK = Task("t", {"seed": 3})
CLOSED: list[int] = []


class Parrot(gymnasium.Env[str, str]):
    """A game: repeat the secret from the observation; each wrong word costs 0.25."""

    observation_space = Text(100, charset=string.printable)
    action_space = Text(10, charset="abc")

    def __init__(self, secret: str = "abc") -> None:
        self.secret = secret

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"say {self.secret} {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_right = action == self.secret
        return f"not {action}", 1.0 if is_right else -0.25, is_right, False, {}

    def close(self) -> None:
        CLOSED.append(1)


class StartsAtFive(Parrot):
    action_space = Discrete(3, start=5)  # type: ignore[assignment]


class Pixels(Parrot):
    action_space = Box(0, 1)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("Parrot-v0", lambda **make: Parrot(**make), max_episode_steps=4)
    gymnasium.register("Pixels-v0", lambda **make: Pixels(**make))
    CLOSED.clear()
    yield
    for name in ("Parrot-v0", "Pixels-v0"):
        del gymnasium.registry[name]


async def play(env: GymEnv, *answers: str) -> tuple[Transcript, Score, Sequence[str]]:
    """Play an episode; return the transcript, the score, and the messages to the model."""
    async with ChatEndpoint(answers) as server:
        transcript = await env.run(TASK, server.endpoint)
        await env.close()
    prompts = [each["content"] for each in transcript.data["messages"] if each["role"] == "user"]
    return transcript, await env.score(TASK, transcript), prompts


async def test_texts_are_passed_unchanged_and_rewards_add_up() -> None:
    env = GymEnv(env_id="Parrot-v0", make={"secret": "cab"})
    transcript, score, prompts = await play(env, "abc", "Hello!", " cab\n")
    assert prompts == ["say cab 3", "not abc", "say 1 to 10 of the allowed characters"]
    assert score.reward == 0.75
    assert score.metrics == {"num_steps": 2.0, "num_unreadable": 1.0, "num_turns": 3.0}
    assert not transcript.truncated
    assert CLOSED == [1, 1]  # the instance that showed its actions, and the rollout's


async def test_a_game_that_its_own_limit_ends_is_truncated() -> None:
    transcript, score, _ = await play(GymEnv(env_id="Parrot-v0"), "a", "a", "a", "a", "abc")
    assert transcript.truncated
    assert score.reward == -1.0


async def test_a_game_that_our_limit_ends_is_truncated_and_closed() -> None:
    transcript, score, _ = await play(GymEnv(env_id="Parrot-v0", max_turns=1), "a", "abc")
    assert transcript.truncated
    assert score.reward == -0.25
    assert CLOSED == [1, 1]


async def test_frozen_lake_is_shown_as_letters_and_played_by_action_names() -> None:
    make = {"is_slippery": False, "render_mode": "ansi"}
    names = ["left", "down", "right", "up"]
    env = GymEnv(env_id="FrozenLake-v1", make=make, actions=names)
    path = ["Down.", "jump", "down", "RIGHT", "right", "down", "right"]
    transcript, score, prompts = await play(env, *path)
    assert prompts[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert prompts[1].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert prompts[2] == "say one of: left, down, right, up"
    assert score.reward == 1.0
    assert not transcript.truncated


async def test_actions_without_names_are_numbers_and_other_observations_their_text() -> None:
    env = GymEnv(env_id="FrozenLake-v1", make={"is_slippery": False}, max_turns=3)
    _, score, prompts = await play(env, "1", "4", "-1")
    assert prompts == ["0", "4", "say 0 to 3"]
    assert score.metrics["num_unreadable"] == 2.0


async def test_observations_other_than_text_are_shown_as_json() -> None:
    _, score, prompts = await play(GymEnv(env_id="Blackjack-v1", actions=["stick", "hit"]), "stick")
    assert re.fullmatch(r"\[\d+,\d+,[01]\]", prompts[0])
    assert score.reward in (-1.0, 0.0, 1.0)


def test_tasks_are_determined_by_split_and_seed() -> None:
    env = GymEnv(env_id="Parrot-v0", num_seeds=2)
    first = [*itertools.islice(env.tasks("train", 0), 50)]
    assert first == [*itertools.islice(env.tasks("train", 0), 50)]
    assert {task.data["seed"] for task in first} == {0, 1}
    assert first != [*itertools.islice(env.tasks("eval", 0), 50)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"env_id": "NoSuchGame-v0"}, "NoSuchGame"),
        ({"env_id": "Pixels-v0"}, "cannot be said"),
        ({"env_id": "Parrot-v0", "actions": ["a"]}, "cannot be said"),
        ({"env_id": "FrozenLake-v1", "actions": ["left"]}, "1 names for 4 actions"),
        ({"env_id": "Parrot-v0", "make": {"sceret": "a"}}, "sceret"),
    ],
)
def test_an_environment_that_cannot_be_played_as_text_is_refused_at_once(
    settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(EnvError, match=why):
        load_env("gym", settings)


async def test_numbered_actions_begin_at_the_start_of_the_space() -> None:
    gymnasium.register("Late-v0", lambda **make: StartsAtFive(**make))
    try:
        _, score, prompts = await play(GymEnv(env_id="Late-v0", make={"secret": 6}), "4", "6")
    finally:
        del gymnasium.registry["Late-v0"]
    assert prompts == ["say 6 3", "say 5 to 7"]
    assert score.reward == 1.0
