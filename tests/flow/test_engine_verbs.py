"""`rollmesh engine add`, `remove` and `list` on a living mesh lose, double and change nothing."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.ids import GroupId
from rollmesh.core.process import INTERRUPTED
from rollmesh.engine.fleet import COUNTS
from rollmesh.launch.folder import read_pids
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.run_history import RunHistory
from rollmesh.trainer.weights.folder import NO_STEP
from tests.flow.trained_mesh import TrainedMesh, wait_for
from tests.flow.trained_mesh import model as model  # the fixture
from tests.flow.worker_mesh import (
    PATIENCE_S,
    Mesh,
    Process,
    ask,
    byte_token,
    check_exact,
    look_until,
    running,
    take,
)

ROLLMESH = (sys.executable, "-m", "rollmesh.cli.main")
NUM_TOKENS = 30
EXACT = 1e-3
"""Bound of float32 sums that are computed in another order."""


class Verbs:
    """`rollmesh engine ...` on the mesh with this router."""

    def __init__(self, router: str, folder: Path) -> None:
        self._router = router
        self._folder = folder

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            (*ROLLMESH, "engine", *words, "--router", self._router),
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr."""
        with self.start(*words) as verb:
            out, err = verb.communicate(timeout=2 * PATIENCE_S)
        return verb.returncode, out, err

    def done(self, *words: str) -> list[str]:
        """Return the lines of a verb that succeeds."""
        code, out, err = self.run(*words)
        assert code == 0, err
        return out.splitlines()

    def refused(self, *words: str) -> str:
        """Return the one line of a verb that fails."""
        code, _, err = self.run(*words)
        assert code == 2
        [line] = err.splitlines()
        return line

    def rows(self) -> dict[str, dict[str, Any]]:
        [line] = self.done("list", "--json")
        return {row["url"]: row for row in msgspec.json.decode(line)}

    def origins(self) -> dict[str, str]:
        return {url: row["origin"] for url, row in self.rows().items() if row["phase"] != "gone"}


# scripted engines


class TwoEngines(Mesh):
    """A router and a worker with two scripted engines, whose weights count as they are."""

    def __init__(self, folder: Path, engines: list[ScriptedEngine], stack: ExitStack) -> None:
        self.engines = engines
        super().__init__(folder, engines[0], stack)
        self.verbs = Verbs(self.router.ready.address, folder)

    def settings(self, env: str = "echo", **env_settings: object) -> list[str]:
        turns = {"num_turns": 2, "prompt_chars": 20, "turn_chars": 10, "max_tokens": NUM_TOKENS}
        return super().settings(env, **(env_settings or turns))

    def start_router(self, bind: str = "tcp://127.0.0.1:0") -> Process:
        args = ["router", *self.settings(), "--set", f"router.bind={bind}", "--fixed-weights"]
        args += [word for each in self.engines for word in ("--engine", each.url)]
        args += ["--engine-changes", str(self.folder / "engines.json")]
        return self._stack.enter_context(running(self.folder, *args))


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[TwoEngines]:
    async with ScriptedEngine(byte_token) as one, ScriptedEngine(byte_token) as two:
        with ExitStack() as stack:
            mesh = await asyncio.to_thread(TwoEngines, tmp_path, [one, two], stack)
            await asyncio.to_thread(mesh.worker, "worker-0", max_rollouts=16)
            yield mesh
            await one.release()
            await two.release()


async def hold_two_groups(mesh: TwoEngines, client: RolloutClient) -> list[GroupId]:
    """Ask for two groups of four, and wait until the engines hold their turns."""
    one, two = mesh.engines
    one.hold()
    two.hold()
    group_ids = [ask(client, num_samples=4) for _ in range(2)]
    await one.until(lambda: one.num_live > 0)
    await two.until(lambda: one.num_live + two.num_live == 8)
    return group_ids


async def test_a_drained_engine_ends_its_requests_and_gets_no_more(mesh: TwoEngines) -> None:
    one, two = mesh.engines
    with closing(mesh.client()) as client:
        group_ids = await hold_two_groups(mesh, client)
        num_held, num_before = one.num_live, one.num_seen("/generate")
        verb = await asyncio.to_thread(mesh.verbs.start, "remove", one.url, "--drain")
        with verb:
            assert verb.stdout
            # The load of a probe before the drain may be older than the requests: it is not shown.
            expected = f"{one.url} drains: {num_held} requests left\n"
            while (line := await asyncio.to_thread(verb.stdout.readline)) != expected:
                assert line == f"{one.url} drains: it {COUNTS}\n"
            await one.release()  # it ends its requests; the next turns go to the other engine
            await two.release()
            out, err = await asyncio.to_thread(verb.communicate, timeout=PATIENCE_S)
        assert (verb.returncode, err) == (0, "")
        assert out.splitlines()[-1] == f"{one.url} is removed; it is drained"
        arrivals = await take(client, num_groups=2)
        assert sorted(each.group_id for each in arrivals) == group_ids
        engines: set[str] = set()
        for finished in arrivals:
            assert isinstance(finished, Finished)
            engines |= check_exact(finished, 2 * NUM_TOKENS)
        assert engines == {one.url, two.url}
        assert one.num_seen("/generate") == num_before
        assert not one.num_seen("/abort_request")
        assert await asyncio.to_thread(client.take, 0.2) == []


async def test_requests_of_a_removed_engine_resume_elsewhere_from_their_exact_tokens(
    mesh: TwoEngines,
) -> None:
    one, two = mesh.engines
    with closing(mesh.client()) as client:
        group_ids = await hold_two_groups(mesh, client)
        await one.allow(one.num_live * 5)
        await one.until(lambda: one.num_sampled >= 5)
        removed = await asyncio.to_thread(mesh.verbs.done, "remove", one.url)
        assert removed == [f"{one.url} is removed; its requests resume on other engines"]
        await two.until(lambda: two.num_live == 8)
        await two.release()
        arrivals = await take(client, num_groups=2)
        assert sorted(each.group_id for each in arrivals) == group_ids
        for finished in arrivals:
            assert isinstance(finished, Finished)
            assert two.url in check_exact(finished, 2 * NUM_TOKENS)
        assert await asyncio.to_thread(client.take, 0.2) == []


async def test_changes_survive_a_router_that_is_killed(mesh: TwoEngines) -> None:
    one, two = mesh.engines
    verbs = mesh.verbs
    async with ScriptedEngine(byte_token) as three:

        def change() -> dict[str, str]:
            assert verbs.done("add", three.url)[-1] == f"{three.url} is ready, policy version 0"
            verbs.done("remove", one.url)
            mesh.router.kill()
            mesh.router = mesh.start_router(mesh.router.ready.address)
            return verbs.origins()

        expected = {three.url: "added", two.url: "configured"}
        assert await asyncio.to_thread(change) == expected
        await mesh.until(lambda: {row["phase"] for row in verbs.rows().values()} == {"ready"})
        with closing(mesh.client()) as client:
            group_id = ask(client, num_samples=8)
            [finished] = await take(client)
            assert finished.group_id == group_id
            assert isinstance(finished, Finished)
            assert check_exact(finished, 2 * NUM_TOKENS) <= {two.url, three.url}


async def test_the_last_engine_needs_force(mesh: TwoEngines) -> None:
    one, two = mesh.engines

    def run() -> None:
        mesh.verbs.done("remove", one.url)
        for drain in ((), ("--drain",)):
            line = mesh.verbs.refused("remove", two.url, *drain)
            assert f"{two.url} is the last engine" in line
            assert "--force" in line
        lines = mesh.verbs.done("remove", two.url, "--force")
        assert lines[0] == "no other engine serves now: rollouts wait until one does"
        assert mesh.verbs.origins() == {}

    await asyncio.to_thread(run)


async def test_ctrl_c_ends_the_wait_and_not_the_drain(mesh: TwoEngines) -> None:
    one, two = mesh.engines
    one.hold()
    with closing(mesh.client()) as client:
        ask(client, num_samples=8)
        await one.until(lambda: one.num_live > 0)

        def interrupt() -> tuple[int, str]:
            with mesh.verbs.start("remove", one.url, "--drain") as verb:
                assert verb.stdout
                assert f"{one.url} drains: " in verb.stdout.readline()
                verb.send_signal(signal.SIGINT)
                out, _ = verb.communicate(timeout=PATIENCE_S)
                return verb.returncode, out

        code, out = await asyncio.to_thread(interrupt)
        assert code == INTERRUPTED
        end = f"{one.url} still drains; it is removed when its requests have ended"
        assert out.splitlines()[-1] == end
        assert (await asyncio.to_thread(mesh.verbs.rows))[one.url]["phase"] == "draining"
        await one.release()
        await mesh.until(lambda: list(mesh.verbs.origins()) == [two.url])


async def test_a_bad_engine_is_a_one_line_error(mesh: TwoEngines) -> None:
    def run(url: str, *more: str) -> str:
        return mesh.verbs.refused("add", url, *more)

    refused = await asyncio.to_thread(run, "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in refused
    assert "--no-check" in refused
    assert "scheme, host and port" in await asyncio.to_thread(run, "http://127.0.0.1:9/v1")
    late = await asyncio.to_thread(run, "http://127.0.0.1:9", "--no-check", "--wait-s", "0")
    assert "http://127.0.0.1:9 is joining" in late
    assert mesh.verbs.refused("remove", "http://127.0.0.1:10").startswith(
        "rollmesh: http://127.0.0.1:10 is not an engine of this mesh; there are: "
    )


# embedded engines and a trainer


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trained_mesh_loses_and_doubles_nothing_while_its_engines_change(
    tmp_path: Path, model: Path
) -> None:
    mesh = TrainedMesh(tmp_path, model, {"engine": {"num_embedded": 2}}, num_steps=100_000)
    engine = ("engine", "--model-dir", str(model), "--weight-version", "0")
    options = ("--incremental-streaming-output", "--skip-tokenizer-init")
    try:
        pid = mesh.begin()
        mesh.until(num_rows=2)
        verbs = Verbs(wait_for(mesh.run, "router").address, tmp_path)
        assert set(verbs.origins().values()) == {"configured"}
        with running(tmp_path, *engine, *options) as third:
            change_engines(mesh, verbs, third.ready.address)
            os.kill(pid, signal.SIGTERM)
            assert mesh.end() == INTERRUPTED
        check_history(mesh)
    finally:
        mesh.close()


def change_engines(mesh: TrainedMesh, verbs: Verbs, third: str) -> None:
    """Add an engine, remove one with and one without a drain, and kill the router in between."""
    first, second = verbs.origins()
    ready = re.compile(f"{re.escape(third)} is ready, policy version ([0-9]+)")
    found = ready.fullmatch(verbs.done("add", third)[-1])
    assert found
    assert int(found[1]) > 0, "it serves untrained weights"
    train_on(mesh)
    assert verbs.done("remove", first, "--drain")[-1] == f"{first} is removed; it is drained"
    train_on(mesh)
    router = {row.role: row.pid for row in read_pids(mesh.run)}["router"]
    os.kill(router, signal.SIGKILL)
    look_until(lambda: {row.role: row.pid for row in read_pids(mesh.run)}["router"] != router)
    look_until(lambda: verbs.run("list")[0] == 0)
    assert verbs.origins() == {third: "added", second: "configured"}
    train_on(mesh)
    verbs.done("remove", second)
    assert verbs.origins() == {third: "added"}
    train_on(mesh)
    assert verbs.done("add", first)[-1].startswith(f"{first} is ready, policy version ")
    train_on(mesh)
    assert {row["phase"] for row in verbs.rows().values()} & {"ready", "updating"}


def train_on(mesh: TrainedMesh) -> None:
    """Wait for two more train steps."""
    mesh.until(len(mesh.rows("metrics.jsonl")) + 2)


def check_history(mesh: TrainedMesh) -> None:
    """Check that each step, group and rollout is there once, and that log-probs are exact."""
    history = RunHistory(mesh.run)
    trained = history.trained()
    assert len(set(trained)) == len(trained)
    assert set(history.num_steps_taken.values()) == {1}
    rows, rollouts = mesh.rows("metrics.jsonl"), mesh.rows("trajectories.jsonl")
    # While the router was away, a publication may have failed: such rows are of no step.
    published = [row["refused"] for row in rows if row["step"] == NO_STEP]
    assert published[-1:] in ([], [""]), "engines got the weights later"
    rows = [row for row in rows if row["step"] != NO_STEP]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len({row["rollout_id"] for row in rollouts}) == len(rollouts)
    assert mesh.summary()["num_lost"] == 0
    gaps = [row["logprob_gap_max"] for row in rows if row["logprob_gap_max"] is not None]
    assert len(gaps) > 10
    assert max(gaps) < EXACT
