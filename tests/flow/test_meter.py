"""The exactness meter over a whole mesh: a faulty engine is masked, named and fenced, and training
continues.

Real engines, router, worker and trainer; a proxy in front of an engine alters its log-probs.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.flow.faulty_engine import LogprobFault, no_fault, running

OFF = 0.5
"""The error of a faulty engine's log-probs; the bound is 0.05."""
NUM_STEPS = 2
LONG_PROMPT = 30
SETTINGS: dict[str, Any] = {
    "run": {"name": "run"},
    "dashboard": {"enabled": False},
    "worker": {"num_workers": 1},
    "trainer": {
        "num_steps": NUM_STEPS,
        "groups_per_step": 4,
        "samples_per_group": 4,
        "max_running_groups": 4,
        "max_staleness": 0,
        "eval_rollouts": 0,
    },
}


class Ended:
    """The records of a run that has ended, from the trainer's files."""

    def __init__(self, folder: Path, engines: list[str]) -> None:
        self.engines = engines
        self.summary = msgspec.json.decode((folder / "summary.json").read_bytes())
        self.steps = [row for row in _rows(folder / "metrics.jsonl") if "exactness" in row]
        self.log = list(_rows(folder / "logs" / "trainer.log"))

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.log if each["event"] == event]

    def exact(self, **named: str) -> list[dict[str, Any]]:
        """Rows of the meter on held weights, with these names."""
        rows = [row for step in self.steps for row in step["exactness"]]
        return [r for r in rows if r["kind"] == "exact" and named.items() <= r.items()]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        yield msgspec.json.decode(line)


async def run_mesh(folder: Path, env: str, *faults: LogprobFault) -> Ended:
    """Run `rollmesh up` to its end, with an engine for each fault."""
    model = folder / "model"
    write_tiny_model(model, texts_of(GuessEnv()), TinyShape(), seed=0)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running(model, fault)) for fault in faults]
        values = SETTINGS | {
            "run": {"name": "run", "folder": str(folder)},
            "env": env,
            "model": {"path": str(model), "max_context_tokens": 512},
            "sampling": {"max_tokens": 8},
            "engine": {"urls": engines},
        }
        settings = folder / "mesh.json"
        settings.write_bytes(msgspec.json.encode(values))
        args = ["-m", "rollmesh.cli.main", "up", str(settings), "--no-live"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *args, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
    return Ended(folder / "run", engines)


@pytest.mark.slow
async def test_a_faulty_engine_is_masked_and_fenced_and_training_continues(tmp_path: Path) -> None:
    ended = await run_mesh(tmp_path, "guess", no_fault, lambda _: OFF)
    good, faulty = ended.engines
    assert (ended.summary["num_steps"], ended.summary["num_lost"]) == (NUM_STEPS, 0)
    for row in ended.exact(engine=good):
        assert row["max_gap"] < 1e-3
        assert row["num_masked"] == 0
    for row in ended.exact(engine=faulty):
        assert row["mean_gap"] == pytest.approx(OFF, abs=1e-3)
        assert row["num_masked"] == row["num_samples"]
    for step in ended.steps:
        exact = [row for row in step["exactness"] if row["kind"] == "exact"]
        assert step["num_masked"] == sum(row["num_masked"] for row in exact)
        assert step["num_masked"] < step["num_samples"]
    assert {each["engine"] for each in ended.logged("samples.masked")} == {faulty}
    assert {each["url"] for each in ended.logged("engine.distrusted")} == {faulty}
    fenced = ended.logged("engine.fenced")
    assert {each["url"] for each in fenced} == {faulty}
    assert "none of" in fenced[0]["why"]
    # The engine returned with the next weights, and was found faulty with them again.
    assert len({row["policy_version"] for row in ended.exact(engine=faulty)}) >= 2
    num_masked = {row["engine"]: row["num_masked"] for row in ended.summary["exactness"]}
    assert num_masked[good] == 0 < num_masked[faulty]


@pytest.mark.slow
async def test_a_fault_of_one_dialect_is_named_and_no_engine_is_blamed(tmp_path: Path) -> None:
    def fault(num_prompt_tokens: int) -> float:
        return OFF if num_prompt_tokens > LONG_PROMPT else 0.0

    ended = await run_mesh(tmp_path, "tests.flow.two_dialects:TwoDialects", fault, fault)
    assert ended.summary["num_steps"] == NUM_STEPS
    assert all(row["num_masked"] == row["num_samples"] for row in ended.exact(dialect="messages"))
    assert all(row["num_masked"] == 0 for row in ended.exact(dialect="chat"))
    assert {row["engine"] for row in ended.exact(dialect="messages")} == set(ended.engines)
    masked = ended.logged("samples.masked")
    assert {each.get("dialect") for each in masked} == {"messages"}
    assert not any("engine" in each for each in masked)
    assert not ended.logged("engine.distrusted")
