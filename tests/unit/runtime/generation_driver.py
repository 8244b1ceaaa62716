"""A generation machine with a clock and events of the test, and the actions of its last step.

Time advances only when the test advances it.
"""

from rollmesh.core.types import SamplingParams
from rollmesh.engine.backend import Finish
from rollmesh.runtime.generation.events import (
    AttemptSampled,
    ChooseEngine,
    EngineChosen,
    GenerationRequest,
    ReaderJoined,
    StartAttempt,
)
from rollmesh.runtime.generation.generation import Action, Event, GenerationMachine
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.engine import STOP_TOKEN
from rollmesh.wire.machine import Ticked
from tests.unit.runtime.random_engines import PROMPT

ENGINE = EngineChosen("http://a", "i1", 0)


class GenerationDriver:
    """A machine, a stopped clock, and the actions of the last step."""

    def __init__(
        self,
        *,
        stream: bool = True,
        images: tuple[str, ...] = (),
        min_policy_version: int = 0,
        **params: object,
    ) -> None:
        fields = {"max_tokens": 10, "stop_token_ids": (STOP_TOKEN,), **params}
        request = GenerationRequest(
            generation_id="g",
            session_key="s",
            prompt_ids=PROMPT,
            params=SamplingParams(**fields),  # type: ignore[arg-type]
            min_policy_version=min_policy_version,
            stream=stream,
            images=images,
        )
        self.now_s = 0.0
        self.actions: list[Action] = []
        self.machine = GenerationMachine(request, GenerationSettings(), "r", 0.0)

    def step(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        self.actions = self.machine.step(event, self.now_s)
        return self.actions

    def sample(
        self, attempt: int, *token_ids: int, finish: Finish | None = None, policy_version: int = 0
    ) -> list[Action]:
        logprobs = [-float(token) for token in token_ids]
        return self.step(AttemptSampled(attempt, token_ids, logprobs, policy_version, finish))

    def actions_of(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.actions if isinstance(action, kind)]


def running(**params: object) -> GenerationDriver:
    """Return a machine with one reader and the open attempt 0."""
    driver = GenerationDriver(**params)  # type: ignore[arg-type]
    assert driver.step(Ticked()) == [ChooseEngine(0)]
    driver.step(ReaderJoined())
    [start] = driver.step(ENGINE)
    assert start == StartAttempt(0, "r.0", ENGINE.url, 10, "0", True)
    return driver
