"""Publications one after another to real engines: sample, train, publish through a real router.

- Policy, probe, publisher and router are the trainer's own.
- Rollouts come from an engine that is published to, so the steps are those of a real run.

Used by tests/flow and by the contract.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec

from rollmesh.core.config import PublishConfig, TrainerConfig
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.weights.folder import BackgroundLoop, WeightVersions
from rollmesh.trainer.weights.publisher import PublishReport
from rollmesh.trainer.weights.verdicts import Probe
from tests.contract.processes import announced
from tests.unit.trainer.samples import new_sample

PROMPT = list(range(5, 13))
NUM_GROUPS = 2
GROUP_SIZE = 4
NUM_TOKENS = 16
TIMEOUT_S = 60.0
TRAINER = TrainerConfig(max_logprob_gap=5.0)
"""The defaults, except that samples of a coarse engine train."""


class Publications:
    """Trains on samples of the first engine, and publishes each step's weights to all engines."""

    def __init__(self, policy: Policy, engine: str, shell: PublishShell, folder: Path) -> None:
        self.reports: list[PublishReport] = []
        self._policy = policy
        self._engine = engine
        self._shell = shell
        self._background = BackgroundLoop("publisher")
        self._weights = WeightVersions(folder, self._background, shell.is_loading)
        self._num_steps = 0

    def publish(self) -> PublishReport:
        """Publish the current weights, and return the report."""
        folder = self._weights.next_folder()
        parts = self._policy.export(folder, self._weights.policy_version)
        probe = self._policy.probe()
        self._weights.publish(self._num_steps, folder, parts, self._bring, probe)
        while self._weights.is_publishing:
            self._weights.settled(TIMEOUT_S)
        return self.reports[-1]

    def train(self, num_steps: int = 1) -> None:
        """Take train steps on one batch of fresh rollouts."""
        samples = self._samples()
        for _ in range(num_steps):
            self._policy.step(samples, self._num_steps)
            self._policy.end_step(self._num_steps)
            self._num_steps += 1

    def doubted(self) -> list[str]:
        """Engines that were used although they seemed to ignore updates."""
        return [url for report in self.reports for url in report.doubted]

    def close(self) -> None:
        self._background.call(self._shell.close(), TIMEOUT_S)
        self._background.close()
        self._policy.close()

    async def _bring(
        self, policy_version: int, folder: Path, probe: Probe, parts: tuple[SharedSegment, ...]
    ) -> PublishReport:
        report = await self._shell.publish(policy_version, folder, probe, parts)
        self.reports.append(report)
        return report

    def _samples(self) -> list[Sample]:
        """Groups of rollouts whose reward is the share of even tokens, so that steps agree."""
        body = {
            "input_ids": [PROMPT] * (NUM_GROUPS * GROUP_SIZE),
            "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 1, "ignore_eos": True},
            "return_logprob": True,
        }
        answer = httpx.post(f"{self._engine}/generate", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        logprobs = [each["meta_info"]["output_token_logprobs"] for each in answer.json()]
        return [self._sample(at, row) for at, row in enumerate(logprobs)]

    def _sample(self, at: int, row: list[list[float]]) -> Sample:
        token_ids = [int(token) for _, token, *_ in row]
        group, index = divmod(at, GROUP_SIZE)
        return new_sample(
            PROMPT + token_ids,
            [0] * len(PROMPT) + [1] * len(token_ids),
            seq=group,
            index=index,
            reward=sum(each % 2 == 0 for each in token_ids) / len(token_ids),
            logprobs=[0.0] * len(PROMPT) + [logprob for logprob, *_ in row],
            policy_version=self._weights.policy_version,
        )


@contextmanager
def publications(
    model: Path, engines: Sequence[str], folder: Path, learning_rate: float = 0.0
) -> Iterator[Publications]:
    """A policy that starts as `model`, and a publisher that reaches `engines` through a router;
    `learning_rate` 0 is the default one.
    """
    settings = TRAINER
    if learning_rate:
        settings = msgspec.structs.replace(TRAINER, learning_rate=learning_rate)
    argv = ["-m", "rollmesh.cli.main", "router", "--set", f"run.folder={folder}"]
    for url in engines:
        argv += ["--engine", url]
    with announced(argv) as router:
        shell = PublishShell(router.address, PublishConfig())
        run = Publications(Policy(str(model), settings), engines[0], shell, folder / "weights")
        try:
            yield run
        finally:
            run.close()
