"""`rollmesh eval` as a real process: it reports, survives being killed, and cleans up."""

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.testing.engine import ScriptedEngine
from tests.flow.eval_verb import START_S, Verb
from tests.flow.worker_mesh import PATIENCE_S, TURNS, byte_token, open_mesh


@pytest.fixture
def verb(tmp_path: Path) -> Verb:
    return Verb(tmp_path)


async def test_an_evaluation_starts_a_mesh_and_reports_every_rollout(verb: Verb) -> None:
    async with ScriptedEngine(byte_token, weight_version="default") as engine:
        await verb.start(*verb.mesh_args(engine, num_tasks=3))
        code, out, err = await verb.ends()
    assert (code, err) == (0, "")
    report: dict[str, Any] = msgspec.json.decode(out)
    assert (report["num_tasks"], report["num_rollouts"]) == (3, 6)
    assert report["success"]["mean"] == report["pass_at"]["2"]["mean"] == 1.0
    assert report["turns_per_rollout"] == 2
    assert report["tokens_per_rollout"] == 2 * 3
    rows = verb.rows()
    assert Counter(row.task_id for row in rows) == {row.task_id: 2 for row in rows}
    assert msgspec.json.decode((verb.out / "summary.json").read_bytes()) == report
    lines = (verb.out / "trajectories.jsonl").read_bytes().splitlines()
    kept = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    assert {each["rollout_id"] for each in kept} == {f"{row.group_id}/{row.index}" for row in rows}
    assert all(each["messages"] and each["samples"][0]["token_ids"] for each in kept)
    status = await verb.status()
    assert (status["run"]["name"], status["run"]["phase"]) == ("out", "done")


@pytest.mark.slow
async def test_killed_evaluation_resumes_where_it_stopped(verb: Verb) -> None:
    one_at_a_time = ["--set", "worker.max_rollouts=2"]
    async with ScriptedEngine(byte_token) as engine:
        engine.hold()
        await verb.start(*verb.mesh_args(engine, num_tasks=4), *one_at_a_time)
        async with asyncio.timeout(START_S):
            await engine.until(lambda: engine.num_live == 2)
            await verb.until_status(lambda router: router["workers"][0]["in_flight"] == 2)
        await engine.allow(2 * 2 * 3)
        before = await verb.until_rows(2)
        async with asyncio.timeout(PATIENCE_S):
            await engine.until(lambda: engine.num_live == 2)
        verb.process.kill()
        await verb.process.communicate()
        await engine.release()
        seen = engine.num_seen("/generate")
        await verb.start("--resume", "--json")
        code, out, err = await verb.ends()
        assert (code, err) == (0, "")
        assert engine.num_seen("/generate") - seen == 3 * 2 * 2
    rows = verb.rows()
    assert rows[: len(before)] == before
    assert Counter(row.task_id for row in rows) == {row.task_id: 2 for row in rows}
    assert msgspec.json.decode(out)["num_rollouts"] == 4 * 2


async def test_evaluation_on_a_running_mesh_is_stopped_and_resumed(
    verb: Verb, tmp_path: Path
) -> None:
    async with open_mesh(tmp_path / "mesh") as mesh:
        await asyncio.to_thread(mesh.worker, "worker-0")
        mesh.engine.hold()
        args = ["--config", "mesh.json", "--router", mesh.router.ready.address]
        await verb.start(*args, "-n", "2", "--num-tasks", "3", "--json")
        await mesh.engine.until(lambda: mesh.engine.num_live == 6)
        verb.process.send_signal(signal.SIGINT)
        code, _, err = await verb.ends()
        assert code == 130
        again = f"rollmesh eval --resume --out {verb.out} --router {mesh.router.ready.address}"
        assert err == f"stopped; `{again}` resumes it\n"
        await mesh.engine.until(lambda: mesh.engine.num_live == 0)
        await mesh.engine.release()
        await verb.start("--router", mesh.router.ready.address, "--resume", "--json")
        code, out, err = await verb.ends()
    assert (code, err) == (0, "")
    assert msgspec.json.decode(out)["num_rollouts"] == 6


async def test_evaluation_killed_again_and_again_runs_no_rollout_twice(
    verb: Verb, tmp_path: Path
) -> None:
    num_tasks = 30
    async with open_mesh(tmp_path / "mesh") as mesh:
        await asyncio.to_thread(mesh.worker, "worker-0", max_rollouts=4)
        args = ["--router", mesh.router.ready.address, "--json"]
        first = ["--config", "mesh.json", "-n", "2", "--num-tasks", str(num_tasks)]
        mesh.engine.hold()
        for more, num_rows in ((first, 4), (["--resume"], 12), (["--resume"], 22)):
            await verb.start(*args, *more)
            await mesh.engine.allow(10 * 2 * 3)  # tokens of ten rollouts, in any of the four
            await verb.until_rows(num_rows)
            verb.process.kill()
            await verb.process.communicate()
        await mesh.engine.release()
        await verb.start(*args, "--resume")
        code, out, err = await verb.ends()
        assert (code, err) == (0, "")
        assert mesh.engine.num_seen("/generate") == num_tasks * 2 * TURNS["num_turns"]
    assert msgspec.json.decode(out)["num_rollouts"] == num_tasks * 2
    assert set(Counter(row.task_id for row in verb.rows()).values()) == {2}


async def test_environment_that_does_not_load_ends_the_evaluation_with_a_one_line_error(
    verb: Verb,
) -> None:
    source = "from rollmesh.envs.echo import EchoEnv\n\nclass TheEnv(EchoEnv):\n"
    source += "    def __init__(self):\n        import sys\n        super().__init__()\n"
    source += "        if 'worker' in sys.argv: raise OSError('no licence on this machine')\n"
    (verb.folder / "picky.py").write_text(source)
    args = ["--env", "picky:TheEnv", "--set", "env_settings={}"]
    async with ScriptedEngine(byte_token) as engine:
        await verb.start(*verb.mesh_args(engine, num_tasks=1), *args)
        code, out, err = await verb.ends()
    assert (code, out) == (2, "")
    assert "no licence on this machine" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("info", "weights"), [("default", "0"), ("5", "4")])
async def test_evaluation_fails_if_an_engine_reports_two_names_of_its_weights(
    verb: Verb, info: str, weights: str
) -> None:
    async with ScriptedEngine(byte_token, weight_version=weights) as engine:
        engine.info_version = info
        await verb.start(*verb.mesh_args(engine, num_tasks=2))
        code, _, err = await verb.ends()
    assert (code, err) == (0, "")
    assert len(verb.rows()) == 4
    assert engine.num_seen("/generate") == 4 * 2
