"""Gymnasium environments as conversations: observations are messages, and answers are actions.

    reset --observation--> the model answers --> step --observation--> ... --> ended
                +--no valid action--> an error message; the turn counts

- For environments that text can represent: text spaces unchanged, discrete actions by number or
  name, other observations by `render_mode="ansi"`.
- The reward is the sum over the game's steps, and a game that a limit ended is `truncated`.
- Needs the extra `gym`.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.chat import ChatReply
from rollmesh.envs.env import Transcript
from rollmesh.envs.multi_turn import MultiTurnEnv, Prompt, Talk
from rollmesh.envs.tools import as_text

if TYPE_CHECKING:
    import gymnasium

_COLOURED = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


class GymEnv(MultiTurnEnv):
    """Games of `gymnasium.make(env_id, **make)`; a task is a seed.

    `env_id` may be `module:Name-v0`, which imports the module that registers it. `actions` names
    the actions of a discrete space, in order; without names they are numbers.
    """

    def __init__(
        self,
        *,
        env_id: str,
        make: Mapping[str, Json] | None = None,
        actions: Sequence[str] = (),
        system: str = "",
        max_turns: int = 64,
        max_tokens: int = 0,
        num_seeds: int = 0,
    ) -> None:
        """`num_seeds` different games; 0 is no limit. EnvError if text cannot represent the
        game."""
        super().__init__(max_turns=max_turns, max_tokens=max_tokens, system=system)
        self._env_id = env_id
        self._make = dict(make or {})
        self._num_seeds = num_seeds
        game = self._new_game()
        self._reader = _reader(game.action_space, actions)
        game.close()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield games by their seeds, endlessly."""
        rng = random.Random(f"{split}/{seed}")
        while True:
            game_seed = rng.randrange(self._num_seeds or 2**31)
            yield Task(id=f"{self._env_id}-{game_seed}", data={"seed": game_seed})

    def begin(self, task: Task, talk: Talk) -> Prompt:
        """Start a game and return its first observation."""
        talk.data.update(reward=0.0, num_steps=0, num_unreadable=0)
        talk.held = self._new_game()
        seen, _ = talk.held.reset(seed=task.data["seed"])
        return _observation_text(talk.held, seen)

    def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Prompt | None:
        """Do one step; None if the game is over."""
        del task
        action = self._reader.read(reply.text)
        if action is None:
            talk.data["num_unreadable"] += 1
            return self._reader.hint
        seen, reward, is_over, is_truncated, _ = talk.held.step(action)
        talk.data["reward"] += float(reward)
        talk.data["num_steps"] += 1
        talk.truncated = bool(is_truncated)
        return None if is_over or is_truncated else _observation_text(talk.held, seen)

    def finish(self, task: Task, talk: Talk) -> None:
        """Close the game."""
        del task
        if talk.held is not None:
            talk.held.close()

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Return the sum of the rewards."""
        del task
        data = transcript.data
        names = ("num_steps", "num_unreadable", "num_turns")
        return Score(data["reward"], {name: float(data[name]) for name in names})

    def _new_game(self) -> "gymnasium.Env[Any, Any]":
        library = _library()
        try:
            game: gymnasium.Env[Any, Any] = library.make(self._env_id, **self._make)
        except library.error.Error as error:
            raise EnvError(f"gymnasium cannot make {self._env_id}: {error}") from None
        return game


def _library() -> ModuleType:
    try:
        import gymnasium  # noqa: PLC0415 - keeps numpy out of workers that play no such games
    except ModuleNotFoundError:
        raise EnvError("gymnasium is not installed: pip install '.[gym]' in a checkout") from None
    return gymnasium


class _TextReader:
    """The model's text is the action."""

    def __init__(self, space: "gymnasium.spaces.Text") -> None:
        self._space = space
        self.hint = f"say {space.min_length} to {space.max_length} of the allowed characters"

    def read(self, text: str) -> str | None:
        """Return the action; None if the text is invalid, and the model gets `hint`."""
        action = text.strip()
        return action if self._space.contains(action) else None


class _DiscreteReader:
    """The model answers with a number, or one of the names, and nothing else."""

    def __init__(self, space: "gymnasium.spaces.Discrete[Any]", names: Sequence[str]) -> None:
        first, last = int(space.start), int(space.start + space.n - 1)
        labels = [name.lower() for name in names] or [str(n) for n in range(first, last + 1)]
        if len(labels) != last - first + 1:
            raise EnvError(f"{len(labels)} names for {last - first + 1} actions; name each")
        self._actions = dict(zip(labels, range(first, last + 1), strict=True))
        self.hint = f"say one of: {', '.join(labels)}" if names else f"say {first} to {last}"

    def read(self, text: str) -> int | None:
        """Return the action; None if the text is invalid, and the model gets `hint`."""
        return self._actions.get(text.strip().rstrip(".!").lower())


def _reader(space: "gymnasium.Space[Any]", names: Sequence[str]) -> "_TextReader | _DiscreteReader":
    """EnvError for a space whose actions have no text form."""
    spaces = _library().spaces
    if isinstance(space, spaces.Discrete):
        return _DiscreteReader(space, names)
    if isinstance(space, spaces.Text) and not names:
        return _TextReader(space)
    raise EnvError(f"actions of {space} cannot be said; text and discrete ones can")


def _observation_text(game: "gymnasium.Env[Any, Any]", seen: object) -> str:
    """Return an observation as text; colours of a text picture become brackets."""
    if isinstance(seen, str):
        return seen
    if game.render_mode == "ansi":
        return _COLOURED.sub(r"[\1]", str(game.render())).strip("\n")
    return as_text(_plain(seen))


def _plain(seen: Any) -> Json:
    """Convert arrays and numbers of numpy's to JSON values."""
    if isinstance(seen, Mapping):
        return {str(name): _plain(value) for name, value in seen.items()}
    if isinstance(seen, list | tuple):
        return [_plain(value) for value in seen]
    return seen.tolist() if hasattr(seen, "tolist") else seen
