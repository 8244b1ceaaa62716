"""Unmodified agents under `rollmesh up` with isolation, while a process of each role is killed.

Launch is killed last, and `--resume` continues the run. The agents use the stock OpenAI client or
httpx. Nothing is lost, tokens are exact, and no process, control group or scratch folder is left.
Network namespaces end with their last process.
"""

import itertools
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from transformers import AutoModelForCausalLM

from rollmesh.launch.folder import read_pids
from rollmesh.testing.run_history import RunHistory
from rollmesh.trainer.controller.hub import MODULE
from tests.flow.demo import Running, follow, read
from tests.flow.test_run import kept, logprob_gaps
from tests.flow.trained_mesh import model as model  # the fixture
from tests.security.test_isolation import mode as mode  # the fixture
from tests.security.test_isolation import processes_named

MODES = pytest.mark.parametrize("mode", ["bwrap", "uid"], indirect=True)
ROLES = ("worker-0", "router", "engine-0", "dashboard", "trainer", "rank", "worker-1")
ROLES_WITH_AGENTS = ("worker-0", "worker-1")
"""The roles whose end depends on the isolation."""
MANY_STEPS, NUM_MORE = 10_000, 2
"""Steps before launch is killed, and after it."""
FIRST_UIDS, NUM_UIDS = {"bwrap": 731_000, "uid": 732_000}, 64
ENDS_WITHIN_S = 240
GAP = 1e-3


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files that other users can pass through, as /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="kills-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


class Run:
    """`rollmesh up` with agents of one kind."""

    def __init__(self, folder: Path, model: Path, scratch: Path, **sections: Any) -> None:
        self.run = folder / "run"
        self._scratch = scratch
        self._settings = folder / "mesh.json"
        values = {
            "run": {"name": "run", "folder": str(folder), "seed": 1},
            "model": {"path": str(model), "max_context_tokens": 512},
            "sampling": {"max_tokens": 8},
            "publish": {"lease_s": 3.0},
            "dashboard": {"bind": "127.0.0.1:0"},
            **sections,
        }
        self._settings.write_bytes(msgspec.json.encode(values))
        self.process = self._start()

    def _start(self, *args: str) -> Running:
        argv = ["up", str(self._settings), "--no-live", *args]
        return Running(
            [sys.executable, "-m", "rollmesh.cli.main", *argv],
            env=os.environ | {"TMPDIR": str(self._scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        self.process.kill()  # and all processes that it started
        self.process.communicate()

    def until_next_step(self) -> None:
        """Wait until the trainer has finished a step that it has not finished now."""
        path = self.run / "metrics.jsonl"
        num_rows = path.read_bytes().count(b"\n") if path.exists() else 0
        with closing(follow(path)) as rows:
            next(itertools.islice(rows, num_rows, None))

    def kill(self, role: str) -> None:
        """Kill the role's process, and wait until its successor serves or trains."""
        child = "trainer" if role == "rank" else role
        pid = {row.role: row.pid for row in read_pids(self.run)}[child]
        victim = psutil.Process(pid)
        if role == "rank":
            victim = [each for each in victim.children() if MODULE in each.cmdline()][-1]
        victim.kill()
        with closing(follow(self.run / "logs" / "launch.log")) as events:
            of_child = (each for each in events if each.get("child") == child)
            next(each for each in of_child if each.get("pid") == pid)
            next(each for each in of_child if each["event"] == "child.exited")
            next(each for each in of_child if each["event"] == "child.started")
            if child != "trainer":
                next(each for each in of_child if each["event"] == "child.ready")

    def kill_launch(self) -> int:
        """Kill launch, with which all its processes end, and resume the run for some steps.

        Returns the number of steps by then.
        """
        processes = [
            psutil.Process(row.pid) for row in read_pids(self.run) if psutil.pid_exists(row.pid)
        ]
        self.process.kill()
        self.process.communicate(timeout=ENDS_WITHIN_S)
        assert psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1] == []
        num_steps = max(RunHistory(self.run).num_steps_taken) + NUM_MORE
        self.process = self._start("--resume", "--set", f"trainer.num_steps={num_steps}")
        return num_steps


def check_whole(run: Path, num_steps: int) -> None:
    """Check that each step and group is trained once, and no rollout is lost."""
    history, summary = RunHistory(run), read(run / "summary.json")
    assert history.num_steps_taken == dict.fromkeys(range(num_steps), 1)
    assert len(set(history.trained())) == len(history.trained())
    assert (summary["num_steps"], summary["num_lost"]) == (num_steps, 0)
    assert summary["ended"] == "done"
    lines = (run / "trajectories.jsonl").read_bytes().splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert len({row["rollout_id"] for row in rows}) == len(rows) == summary["num_rollouts"]
    assert {row["outcome"] for row in rows} == {"completed"}


def check_exact(run: Path, weights: Path) -> None:
    """Check that each recorded token has the log-prob that the weights of its version give."""
    models: dict[int, Any] = {}
    num_tokens = 0
    for line in (run / "trajectories.jsonl").read_bytes().splitlines():
        for sample in msgspec.json.decode(line)["samples"]:
            for policy_version in set(sample["policy_versions"]) - {-1}:
                if policy_version not in models:
                    folder = weights / f"v{policy_version:06d}"
                    models[policy_version] = AutoModelForCausalLM.from_pretrained(folder)
                gaps = logprob_gaps(models[policy_version], sample, policy_version)
                assert max(gaps) <= GAP
                num_tokens += len(gaps)
    assert len(models) >= 2
    assert num_tokens >= 100


def check_nothing_left(run: Path, scratch: Path, mark: str, first_uid: int) -> None:
    """Check that no process, control group or scratch folder of the run is left."""
    pids = {row.pid for row in read_pids(run)}
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert processes_named(mark) == []
    slots = range(first_uid, first_uid + NUM_UIDS)
    of_slots = [each for each in psutil.process_iter(["uids"]) if each.info["uids"]]
    assert [each for each in of_slots if each.info["uids"].real in slots] == []
    names = {f"rollmesh-{pid}-" for pid in pids}
    groups = [
        os.path.join(place, folder)
        for place, folders, _ in os.walk("/sys/fs/cgroup")
        for folder in folders
        if folder.startswith(tuple(names))
    ]
    assert groups == []
    assert list(scratch.glob("rollmesh-*")) == []


def train_and_kill(
    folder: Path, model: Path, scratch: Path, mode: str, kind: str, roles: tuple[str, ...]
) -> None:
    """Train to the last step, killing the processes of `roles` in turn, and check what is left."""
    mark = f"agent-{secrets.token_hex(8)}"
    run = Run(
        folder,
        model,
        scratch,
        env="tests.security.agent_env:Agent",
        env_settings={"kind": kind, "mark": mark},
        worker={
            "num_workers": 2,
            "max_rollouts": 4,
            "isolation": mode,
            "isolation_first_uid": FIRST_UIDS[mode],
            "isolation_num_uids": NUM_UIDS,
        },
        trainer={
            "num_steps": MANY_STEPS,
            "groups_per_step": 2,
            "samples_per_group": 2,
            "max_running_groups": 3,
            "checkpoint_steps": 2,
            "eval_rollouts": 0,
            "device": "cpu",
            "num_ranks": 2,
            "max_logprob_gap": 1.0,
        },
        launch={"max_restarts": 1000},
    )
    with closing(run), kept(run.run / "weights", run.run / "all_weights"):
        for role in roles:
            run.until_next_step()
            run.kill(role)
        num_steps = run.kill_launch()
        out, _ = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 0, out
    check_whole(run.run, num_steps)
    check_exact(run.run, run.run / "all_weights")
    check_nothing_left(run.run, scratch, mark, FIRST_UIDS[mode])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "roles"), [("bwrap", ROLES), ("uid", ROLES_WITH_AGENTS)], indirect=["mode"]
)
@pytest.mark.timeout(300)
def test_agents_train_to_the_last_step_while_each_role_is_killed(
    mode: str, roles: tuple[str, ...], tmp_path: Path, model: Path, scratch: Path
) -> None:
    train_and_kill(tmp_path, model, scratch, mode, "httpx", roles)


@MODES
@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_agents_with_the_openai_client_train_through_forty_kills(
    mode: str, tmp_path: Path, model: Path, scratch: Path
) -> None:
    train_and_kill(tmp_path, model, scratch, mode, "openai", ROLES * 6)
