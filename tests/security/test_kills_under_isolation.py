"""Unmodified agents under `rollmesh up` with isolation, while a process of each role is killed.

The agents use the stock OpenAI client or httpx. Nothing is lost, tokens are exact, and no process,
control group or scratch folder is left. Network namespaces end with their last process.
"""

import os
import secrets
import signal
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

from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import read_pids
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.models.warmstart import texts_of
from tests.flow.demo import Running, follow, read
from tests.flow.test_run import kept, logprob_gaps
from tests.flow.trained_mesh import Story
from tests.security.test_isolation import mode as mode  # the fixture
from tests.security.test_isolation import processes_named

MODES = pytest.mark.parametrize("mode", ["bwrap", "uid"], indirect=True)
ROLES = ("worker-0", "router", "engine-0", "trainer", "worker-1")
FIRST_UID, NUM_UIDS = 731_000, 64
ENDS_WITHIN_S = 240
GAP = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one with random weights."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


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
        self._pids: dict[str, int] = {}
        """Processes that replaced others, by role."""
        values = {
            "run": {"name": "run", "folder": str(folder), "seed": 1},
            "model": {"path": str(model), "max_context_tokens": 512},
            "sampling": {"max_tokens": 8},
            "publish": {"lease_s": 3.0},
            "dashboard": {"enabled": False},
            **sections,
        }
        settings = folder / "mesh.json"
        settings.write_bytes(msgspec.json.encode(values))
        self.process = Running(
            [sys.executable, "-m", "rollmesh.cli.main", "up", str(settings), "--no-live"],
            env=os.environ | {"TMPDIR": str(scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until_step(self, number: int) -> None:
        """Until the trainer has finished step `number`."""
        with closing(follow(self.run / "metrics.jsonl")) as rows:
            next(row for row in rows if row["step"] >= number)

    def kill(self, role: str) -> None:
        """End its process now, and wait until another one serves, or trains."""
        before = self._pids.get(role) or {row.role: row.pid for row in read_pids(self.run)}[role]
        os.kill(before, signal.SIGKILL)
        with closing(follow(self.run / "logs" / "launch.log")) as events:
            of_role = (each for each in events if each.get("child") == role)
            next(each for each in of_role if each.get("pid") == before)
            exited = next(each for each in of_role if each["event"] == "child.exited")
            assert exited["code"] == -signal.SIGKILL
            started = next(each for each in of_role if each["event"] == "child.started")
            self._pids[role] = started["pid"]
            if role != "trainer":
                next(each for each in of_role if each["event"] == "child.ready")


def check_whole(run: Path, num_steps: int) -> None:
    """Each step and group is trained once, and no rollout is lost."""
    story, summary = Story(run), read(run / "summary.json")
    assert story.num_steps_taken == dict.fromkeys(range(num_steps), 1)
    assert len(set(story.trained())) == len(story.trained())
    assert (summary["num_steps"], summary["num_lost"]) == (num_steps, 0)
    assert summary["ended"] == "done"
    lines = (run / "trajectories.jsonl").read_bytes().splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert len({row["rollout_id"] for row in rows}) == len(rows) == summary["num_rollouts"]
    assert {row["outcome"] for row in rows} == {"completed"}


def check_exact(run: Path, weights: Path) -> None:
    """Each recorded token has the log-prob that the weights of its version give."""
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


def check_nothing_left(run: Path, scratch: Path, mark: str) -> None:
    """No process, control group or scratch folder of the run."""
    pids = {row.pid for row in read_pids(run)}
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert processes_named(mark) == []
    slots = range(FIRST_UID, FIRST_UID + NUM_UIDS)
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
    mark, num_steps = f"agent-{secrets.token_hex(8)}", len(roles) + 2
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
            "isolation_first_uid": FIRST_UID,
            "isolation_num_uids": NUM_UIDS,
        },
        trainer={
            "num_steps": num_steps,
            "groups_per_step": 2,
            "samples_per_group": 2,
            "max_running_groups": 3,
            "checkpoint_steps": 2,
            "eval_rollouts": 0,
            "device": "cpu",
            "max_logprob_gap": 1.0,
        },
        launch={"max_restarts": 1000},
    )
    with run.process as process, kept(run.run / "weights", run.run / "all_weights"):
        for step, role in enumerate(roles):
            run.until_step(step)
            run.kill(role)
        out, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 0, out
    check_whole(run.run, num_steps)
    check_exact(run.run, run.run / "all_weights")
    check_nothing_left(run.run, scratch, mark)


@MODES
@pytest.mark.timeout(300)
def test_agents_train_to_the_last_step_while_each_role_is_killed(
    mode: str, tmp_path: Path, model: Path, scratch: Path
) -> None:
    train_and_kill(tmp_path, model, scratch, mode, "httpx", ROLES)


@MODES
@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_agents_with_the_openai_client_train_on_through_forty_kills(
    mode: str, tmp_path: Path, model: Path, scratch: Path
) -> None:
    train_and_kill(tmp_path, model, scratch, mode, "openai", ROLES * 8)
