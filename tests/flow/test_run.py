"""A short but complete `rollmesh demo`: it trains, ends in success, and can be stopped.

Real processes and real sockets, through the command that users type.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.flow.demo import follow, read, start, start_with

pytestmark = pytest.mark.slow

STOPS_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run that has ended."""
    folder = tmp_path_factory.mktemp("demo")
    run = folder / "runs" / "demo"
    with start(folder) as process, kept(run / "weights", run / "all_weights"):
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert "num_lost" in out
    return run


@contextmanager
def kept(versions: Path, copies: Path) -> Iterator[None]:
    """Link every version's folder elsewhere while a run prunes them; each is used for the next two
    too.
    """
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(0.02):
            for folder in versions.glob("v*[0-9]"):
                if not (copies / folder.name).exists():
                    shutil.copytree(folder, copies / folder.name, copy_function=os.link)

    watcher = threading.Thread(target=keep)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def test_a_run_loses_nothing_and_reports_that(ended: Path) -> None:
    summary = read(ended / "summary.json")
    assert summary["num_steps"] == 6
    assert summary["num_lost"] == 0
    assert summary["success_untrained"] is not None
    assert summary["ended"] == "done"
    assert summary["wall_s"] > 0
    assert {"engine-0", "router", "worker-0", "worker-1", "trainer"} <= set(summary["peak_rss_mb"])


def test_a_run_leaves_all_its_files(ended: Path) -> None:
    left = {path.name for path in ended.iterdir()}
    assert {"config.json", "pids.json", "learning.png", "checkpoint", "model"} <= left
    steps = [
        row["step"]
        for line in (ended / "metrics.jsonl").read_bytes().splitlines()
        if "success" in (row := msgspec.json.decode(line))
    ]
    assert steps == [0, 1, 2, 3, 4, 5]
    telemetry = (ended / "telemetry.jsonl").read_bytes().splitlines()
    assert any(msgspec.json.decode(line)["router"] for line in telemetry)


def test_every_recorded_token_is_exact_under_the_weights_of_its_version(ended: Path) -> None:
    models: dict[int, Any] = {}
    num_tokens = 0
    for line in (ended / "trajectories.jsonl").read_bytes().splitlines():
        for sample in msgspec.json.decode(line)["samples"]:
            for policy_version in set(sample["policy_versions"]) - {-1}:
                if policy_version not in models:
                    folder = ended / "all_weights" / f"v{policy_version:06d}"
                    models[policy_version] = AutoModelForCausalLM.from_pretrained(folder)
                gaps = logprob_gaps(models[policy_version], sample, policy_version)
                assert max(gaps) <= 1e-3
                num_tokens += len(gaps)
    assert len(models) >= 2
    assert num_tokens >= 100


@torch.no_grad()
def logprob_gaps(model: Any, sample: dict[str, Any], policy_version: int) -> list[float]:
    """|recorded - teacher-forced| of the sample's tokens of one version, by stock transformers."""
    token_ids = torch.tensor([sample["token_ids"]])
    logprobs_TV = torch.log_softmax(model(token_ids).logits[0], -1)
    return [
        abs(recorded - float(logprobs_TV[at - 1, token]))
        for at, (token, recorded, sampled_by) in enumerate(
            zip(sample["token_ids"], sample["logprobs"], sample["policy_versions"], strict=True)
        )
        if sampled_by == policy_version
    ]


@pytest.mark.parametrize("mode", ["tensor", "distributed"])
def test_a_run_sends_its_weights_without_a_file_and_still_writes_one(
    mode: str, ended: Path, tmp_path: Path
) -> None:
    settings = {"publish.mode": mode, "trainer.num_steps": 3}
    with start_with(ended / "model", tmp_path, **settings) as process:
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    run = tmp_path / "runs" / "demo"
    events = [line["event"] for line in map(msgspec.json.decode, log_lines(run / "logs"))]
    assert events.count("weights.published") >= 3
    assert not {"engine.takes_files", "engine.gets_file", "group.torn_down"} & set(events)
    assert not {"weights.failed", "engine.update_failed"} & set(events)
    newest = max((run / "weights").iterdir())
    assert AutoModelForCausalLM.from_pretrained(newest)
    pids = [row["pid"] for row in read(run / "pids.json")]
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def log_lines(logs: Path) -> list[bytes]:
    """Lines of the trainer's log."""
    return (logs / "trainer.log").read_bytes().splitlines()


def test_a_run_leaves_no_process(ended: Path) -> None:
    pids = [row["pid"] for row in read(ended / "pids.json")]
    assert len(pids) == 8
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_the_page_of_an_ended_run_reads_its_trajectories(ended: Path) -> None:
    argv = [sys.executable, "-m", "rollmesh.cli.main", "status", str(ended)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=STOPS_WITHIN_S)
    output = done.stdout
    assert output.startswith("demo: done, step 6 of 6\n")


def test_ctrl_c_during_a_run_ends_everything_in_time(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    with start(tmp_path, **{"trainer.num_steps": 10_000}) as process:
        next(row for row in follow(run / "metrics.jsonl") if row["step"] == 2)
        pids = [row["pid"] for row in read(run / "pids.json")]
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=STOPS_WITHIN_S)
    assert process.returncode == 130
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    summary = read(run / "summary.json")
    assert summary["ended"] == "stopped"
    assert summary["resume"].startswith("rollmesh demo --seed 1 --no-live --set ")
    assert summary["resume"].endswith(" --resume")
    assert summary["num_steps"] >= 3
    assert (run / "checkpoint" / "config.json").is_file()


def test_a_run_continues_when_its_output_is_not_read(ended: Path, tmp_path: Path) -> None:
    with start_with(ended / "model", tmp_path, **{"trainer.num_steps": 3}) as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=100)
    assert process.returncode == 0
    assert read(tmp_path / "runs" / "demo" / "summary.json")["ended"] == "done"


@pytest.mark.timeout(240)
def test_a_run_that_loses_its_processes_loses_no_rollout(ended: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    blows = {3: "worker-1", 12: "router", 21: "engine-0"}
    with start_with(ended / "model", tmp_path, **{"trainer.num_steps": 40}) as process:
        for step, role in blows.items():
            next(row for row in follow(run / "metrics.jsonl") if row["step"] == step)
            pids = {row["role"]: row["pid"] for row in read(run / "pids.json")}
            os.kill(pids[role], signal.SIGKILL)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    for role in blows.values():
        assert f"{role} was killed by signal 9; restart in 0.5 s" in out
    summary = read(run / "summary.json")
    assert (summary["num_steps"], summary["num_lost"]) == (40, 0)


@pytest.mark.timeout(240)
def test_a_run_whose_folder_is_moved_ends_and_resumes_in_the_new_place(
    ended: Path, tmp_path: Path
) -> None:
    run, moved = tmp_path / "runs" / "demo", tmp_path / "runs" / "moved"
    with start_with(ended / "model", tmp_path, **{"trainer.num_steps": 10_000}) as process:
        next(row for row in follow(run / "metrics.jsonl") if row["step"] == 1)
        run.rename(moved)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"runs/demo was moved to {moved} while it ran" in output
    record = read(moved / "state.json")
    assert record["state"] == "failed"
    num_steps = read_steps(moved)[-1] + 3
    more = {"trainer.num_steps": num_steps, "run.name": "moved", "publish.lease_s": 3.0}
    with start_with(ended / "model", tmp_path, "--resume", **more) as process:
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert read_steps(moved) == [*range(num_steps)]
    assert read(moved / "summary.json")["num_lost"] == 0


def read_steps(run: Path) -> list[int]:
    """The steps in metrics.jsonl."""
    rows = map(msgspec.json.decode, (run / "metrics.jsonl").read_bytes().splitlines())
    return [row["step"] for row in rows if row["step"] >= 0]


BROKEN = """
from rollmesh.envs.guess import GuessEnv

class Broken(GuessEnv):
    async def score(self, task, transcript):
        return task.data["answer"]
"""


def test_a_run_whose_first_groups_all_fail_at_one_line_ends_with_that_line(
    ended: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken_env.py").write_text(BROKEN)
    more = {"env": "broken_env:Broken", "trainer.max_running_groups": 32}
    with start_with(ended / "model", tmp_path, **more) as process:
        output, _ = process.communicate(timeout=100)
    cause = "the first 16 groups had the same failure: score: KeyError: 'answer'"
    assert process.returncode == 2
    assert f"{cause} (broken_env.py:6 in score); task guess-" in output
    summary = read(tmp_path / "runs" / "demo" / "summary.json")
    assert summary["ended"] == "failed"
    assert cause in summary["cause"]


@pytest.mark.timeout(240)
def test_a_run_reaches_its_goal_despite_signals_that_launch_did_not_send(
    ended: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "demo"
    rounds = {signal.SIGTERM: ("worker-0", "router"), signal.SIGINT: ("worker-1", "engine-0")}
    settings = {"trainer.num_steps": 40, "trainer.checkpoint_steps": 2, "publish.lease_s": 3.0}
    with start_with(ended / "model", tmp_path, **settings) as process:
        next(row for row in follow(run / "metrics.jsonl") if row["step"] >= 2)
        events = follow(run / "logs" / "launch.log")
        ready = {"event": "child.ready", "child": "trainer"}
        next(event for event in events if ready.items() <= event.items())
        for number, others in rounds.items():
            pids = {row["role"]: row["pid"] for row in read(run / "pids.json")}
            for role in (*others, "trainer"):
                os.kill(pids[role], number)
            next(event for event in events if ready.items() <= event.items())
        events.close()
        out, _ = process.communicate(timeout=150)
    assert process.returncode == 0, out
    stopped = "was stopped by a signal that launch did not send; restart in"
    assert out.count(f"trainer {stopped}") == 2
    for role in ("worker-0", "worker-1"):
        assert f"{role} {stopped} 0.5 s" in out
    summary = read(run / "summary.json")
    assert (summary["ended"], summary["num_steps"], summary["num_lost"]) == ("done", 40, 0)
