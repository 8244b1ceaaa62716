"""From a train step to an engine: cost to the train thread, and pause of the engine.

    python -m benchmarks.weights [--quick] [--json] [--check] [--only demo,large]

- Cases: `demo`, the demo's model, and `large`, one of about 100 MB; each is exported, written and
  sent to an embedded engine by every `publish.mode`.
- `save` is a plain write on the train thread, `copy` its lower bound: the same bytes copied in warm
  memory.
- `gap` is the load alone, for which an engine is paused; `engine_cpu` includes its first scores,
  since it maps a file and reads pages on demand; `served` is from the call to those scores.
- Modes take turns and the first round does not count. The train thread's cost is its CPU, the rest
  wall time on an idle machine; medians. The scores change with every version.
"""

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.lib.report import Goal, parser, report
from benchmarks.lib.servers import ServerProcess, cores
from rollmesh.core.config import PublishMode, TrainerConfig
from rollmesh.engine.backend import EngineBackend, backend_factory
from rollmesh.engine.http import HttpClient
from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.publish import transport_for
from rollmesh.trainer.ranks import named_weights
from rollmesh.trainer.weights.transfer import Payload, Transfer

MODES: tuple[PublishMode, ...] = ("disk", "tensor", "distributed")
SHAPES = {
    "demo": TinyShape(),
    "large": TinyShape(
        width=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        mlp_width=1408,
        init_std=0.02,
    ),
}
TIMEOUT_S = 60.0
PROBE = [5, 6, 7, 8, 9]
GOALS = [Goal("large.hand_over_over_save", "<=", 0.5)]
"""The train thread pays less than half of the cost of writing a folder."""


class Stepped(Policy):
    """A policy whose weights change without a step."""

    @torch.no_grad()
    def nudge(self) -> None:
        """Change every weight a little."""
        for each in self._model.parameters():
            each.add_(torch.randn_like(each), alpha=0.01)

    def tensors(self) -> list[torch.Tensor]:
        """Return the files of a weights folder and their sizes."""
        return list(named_weights(self._model).values())


class WeightBench:
    """A policy and an engine, and the versions sent from one to the other."""

    def __init__(
        self, policy: Stepped, engine: ServerProcess, client: EngineBackend, folder: Path
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._client = client
        self._folder = folder
        self._shippings = {mode: Transfer(transport_for(mode), TIMEOUT_S) for mode in MODES}
        self._policy_version = 0
        self.times_s: dict[str, list[float]] = defaultdict(list)

    async def round(self) -> None:
        """Send a version to the engine by each mode, and write a folder on the train thread."""
        for mode in MODES:
            await self._publish(mode)
        with self._timed("save", time.thread_time):
            self._policy.save(self._folder / "saved")
        weights = self._policy.tensors()
        copies = [each.clone() for each in weights]
        with self._timed("copy", time.thread_time):
            for copy, each in zip(copies, weights, strict=True):
                copy.copy_(each)

    async def _publish(self, mode: PublishMode) -> None:
        transfer, self._policy_version = self._shippings[mode], self._policy_version + 1
        folder = self._folder / f"v{self._policy_version:06d}"
        before = await self._client.score(PROBE, "")
        self._policy.nudge()
        with self._timed(f"{mode}.served"):
            with self._timed("hand_over", time.thread_time):
                parts = self._policy.export(folder, self._policy_version)
            payload = Payload(self._policy_version, str(folder), parts)
            await transfer.begin(payload, [self._client])
            await self._client.pause()
            await self._client.flush()
            with self._timed(f"{mode}.engine_cpu", self._engine.cpu_s):
                with self._timed(f"{mode}.gap"):
                    await transfer.load(self._client, self._policy_version, str(folder))
                await self._client.resume()
                after = await self._client.score(PROBE, "")
        await transfer.finish()
        assert after != before, "the weights did not arrive"
        shutil.rmtree(folder)

    @contextmanager
    def _timed(self, name: str, clock_s: Callable[[], float] = time.perf_counter) -> Iterator[None]:
        started_s = clock_s()
        yield
        self.times_s[name].append(clock_s() - started_s)

    async def close(self) -> None:
        """Release engine and memory."""
        for transfer in self._shippings.values():
            await transfer.close()
        self._policy.close()


async def measured(case: str, folder: Path, num_rounds: int) -> dict[str, float]:
    """Return the figures of a case."""
    model = write_tiny_model(folder / "model", texts_of(GuessEnv()), SHAPES[case], seed=0)
    num_bytes = sum(each.nbytes for each in model.parameters())
    argv = [sys.executable, "-m", "rollmesh.engine.embedded", "--model-dir", str(folder / "model")]
    engine = ServerProcess([*argv, "--max-total-tokens", "1024"], cores()[0])
    policy = Stepped(str(folder / "model"), TrainerConfig())
    try:
        async with HttpClient() as http:
            client = backend_factory()(engine.ready.address, http)
            bench = WeightBench(policy, engine, client, folder)
            for number in range(num_rounds + 1):
                await bench.round()
                if number == 0:
                    bench.times_s.clear()
            await bench.close()
    finally:
        engine.end()
    times = {name: statistics.median(each) for name, each in bench.times_s.items()}
    return {
        "megabytes": num_bytes / 1e6,
        **{f"{name}_ms": 1e3 * took_s for name, took_s in times.items()},
        "hand_over_over_save": times["hand_over"] / times["save"],
        "hand_over_over_copy": times["hand_over"] / times["copy"],
        "tensor.gap_over_disk": times["tensor.gap"] / times["disk.gap"],
        "distributed.gap_over_disk": times["distributed.gap"] / times["disk.gap"],
    }


def main() -> None:
    """Measure and report."""
    options = parser("weights", SHAPES).parse_args()
    cases = options.only or list(SHAPES)
    figures: dict[str, float] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            measurements = asyncio.run(measured(case, Path(name), 3 if options.quick else 15))
        figures |= {f"{case}.{figure}": value for figure, value in measurements.items()}
    report(options, figures, [goal for goal in GOALS if goal.figure.split(".")[0] in cases])


if __name__ == "__main__":
    main()
