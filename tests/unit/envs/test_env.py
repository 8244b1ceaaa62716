"""The environment interface: what it does without being told."""

from collections.abc import Iterator

from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Endpoint, Env, Transcript


class Smallest(Env):
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield Task(f"{split}-{seed}")

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        return Transcript(data={"model": agent.model})

    def score(self, task: Task, transcript: Transcript) -> Score:
        return Score(1)


async def test_three_methods_make_an_environment_whose_group_scores_stay_as_given() -> None:
    env = Smallest()
    task = next(env.tasks("train", 0))
    transcript = await env.run(task, Endpoint("http://127.0.0.1:1/v1", "sk", "policy"))
    scores = [env.score(task, transcript), Score(0)]
    assert env.score_group(task, scores) == [Score(1), Score(0)]
    assert not transcript.truncated
    await env.close()
