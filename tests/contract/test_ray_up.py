"""`rollmesh up --on ray` on a real cluster of three nodes: a run survives the loss of any part."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from rollmesh.core.files import read_rows
from rollmesh.core.orphans import memory_prefix
from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import read_addresses, read_pids
from rollmesh.testing.sglang_server import write_sglang_python
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.contract.ray_token import ray_environment

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 240.0
LOOK_S = 0.05
NUM_STEPS = 30
SETTINGS = f"""
env = "guess"
[model]
path = "model"
max_context_tokens = 512
[sampling]
max_tokens = 4
[worker]
max_rollouts = 16
[publish]
lease_s = 3.0
[dashboard]
enabled = false
[trainer]
device = "cpu"
num_steps = {NUM_STEPS}
groups_per_step = 2
samples_per_group = 4
max_running_groups = 4
checkpoint_steps = 4
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, which has no place for our processes, and two nodes that have."""
    with ray_environment() as patch:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - is not installed everywhere

        cluster = Cluster(initialize_head=True, head_node_args=_node(0))
        try:
            for _ in range(2):
                cluster.add_node(**_node(4))
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


def _node(num_cpus: int) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "object_store_memory": 100 * 2**20,
        "include_dashboard": False,
    }


class RunOnRay:
    """A run of `rollmesh up --on ray` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "mesh"
        write_tiny_model(folder / "model", texts_of(GuessEnv()), TinyShape(), seed=0)
        (folder / "mesh.toml").write_text(SETTINGS)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> None:
        argv = [sys.executable, "-m", "rollmesh.cli.main", "up", "--on", "ray", "--no-live"]
        self.process = subprocess.Popen(
            [*argv, *options],
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def until_step(self, step: int) -> None:
        """Wait until the trainer has done this many steps."""
        self.until(lambda: len(self.rows("metrics.jsonl")) >= step)

    def until(self, condition: Any) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process:
                assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < give_up_s, (self.run / "logs" / "launch.log").read_text()
            threading.Event().wait(LOOK_S)

    def pid(self, role: str) -> int:
        """The newest process of a role."""
        return {row.role: row.pid for row in read_pids(self.run)}.get(role, 0)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_rows(self.run / name)

    def log(self) -> str:
        """The log of launch."""
        path = self.run / "logs" / "launch.log"
        return path.read_text() if path.exists() else ""

    def live_workers(self) -> dict[str, int]:
        """The workers that the router considers live, and their pids."""
        url = read_addresses(self.run)["router"].http_address
        workers = httpx.get(f"{url}/status").json()["workers"]
        return {row["worker_id"]: row["pid"] for row in workers if row["state"] == "live"}

    def until_restarted(self, worker_id: str, pid: int) -> None:
        """Wait until another process of the worker is live."""
        self.until(lambda: self.live_workers().get(worker_id, pid) != pid)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return exit code and output."""
        assert self.process
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out

    def check_complete(self) -> None:
        """Check that each step and each rollout is there once, and that no request is lost."""
        rows, rollouts = self.rows("metrics.jsonl"), self.rows("trajectories.jsonl")
        taken = [row["step"] for row in rows if "refused" not in row]
        assert taken == list(range(NUM_STEPS))
        assert len({row["rollout_id"] for row in rollouts}) == len(rollouts)
        summary = msgspec.json.decode((self.run / "summary.json").read_bytes())
        assert (summary["ended"], summary["num_lost"]) == ("done", 0)
        parts = [summary[name] for name in ("num_trained", "num_dropped", "num_open")]
        assert sum(parts) == summary["num_asked"]
        assert summary["num_rollouts"] == len(rollouts)

    def check_nothing_left(self) -> None:
        """Check that no process of the run is left on any node, and no copied key."""
        processes = [
            psutil.Process(pid) for row in read_pids(self.run) if psutil.pid_exists(pid := row.pid)
        ]
        psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert [each for each in processes if each.is_running()] == []
        assert [path.name for path in self._copies()] == []

    def _copies(self) -> Iterator[Path]:
        """The copies of this run's keys and settings on any node."""
        files = [*(self.run / "keys").iterdir(), self.run / "config.json"]
        contents = {path.read_bytes() for path in files}
        for path in Path("/dev/shm").glob(f"{memory_prefix()}*.json"):
            with contextlib.suppress(FileNotFoundError):  # another run's
                if path.read_bytes() in contents:
                    yield path

    def close(self) -> None:
        if self.process:
            with self.process:
                self.process.kill()


@pytest.fixture
def run(tmp_path: Path, cluster: Any) -> Iterator[RunOnRay]:
    del cluster
    run = RunOnRay(tmp_path)
    yield run
    run.close()


def processes_of(worker_id: str) -> list[int]:
    """The processes of a worker, on any node."""
    running = psutil.process_iter(["cmdline"])
    return [each.pid for each in running if worker_id in (each.info["cmdline"] or [])]


def raylet_of(pid: int, cluster: Any) -> Any:
    """The node of the cluster on which the process runs."""
    ancestors = {each.pid for each in psutil.Process(pid).parents()}
    for node in cluster.list_all_nodes():
        [raylet] = node.all_processes["raylet"]
        if raylet.process.pid in ancestors:
            return node
    raise AssertionError(f"no raylet is an ancestor of {pid}")


def test_a_run_survives_the_loss_of_its_router_a_worker_and_two_nodes(
    run: RunOnRay, cluster: Any
) -> None:
    run.start()
    run.until_step(3)
    os.kill(run.pid("router"), signal.SIGKILL)
    run.until_step(6)
    os.kill(run.pid("worker-0"), signal.SIGKILL)
    run.until_step(9)
    os.kill(psutil.Process(run.pid("worker-1")).parents()[1].pid, signal.SIGKILL)  # its actor
    for step, role in ((12, "trainer"), (16, "engine-0")):
        run.until_step(step)
        cluster.remove_node(raylet_of(run.pid(role), cluster), allow_graceful=False)
        cluster.add_node(**_node(4))
    code, out = run.end()
    assert code == 0, out
    run.check_complete()
    run.check_nothing_left()


def test_workers_join_a_living_mesh_and_are_drained(run: RunOnRay) -> None:
    run.start("--set", "trainer.num_steps=100000", "--set", "worker.num_workers=1")
    run.until_step(1)
    router = read_addresses(run.run)["router"].address
    argv = [sys.executable, "-m", "rollmesh.cli.main", "worker", "--on", "ray", "--router", router]
    argv += ["--model-dir", "model"]

    def scale(count: int, env: str = "guess") -> tuple[int, str, list[str]]:
        words = [*argv, "--env", env, "--count", str(count)]
        done = subprocess.run(words, cwd=run.folder, capture_output=True, text=True)
        return done.returncode, done.stderr, done.stdout.splitlines()

    code, error, _ = scale(1, env="missing:Env")
    assert (code, '1 workers failed: env = "missing:Env"' in error) == (2, True), error
    code, error, lines = scale(2)
    assert (code, error, lines[-1]) == (0, "", "2 of 2 new workers run")
    assert lines[0].startswith("1 workers had failed and were removed: env =")
    assert len(run.live_workers()) == 3
    [name, _] = sorted(run.live_workers().keys() - {"worker-0"})
    for _ in range(2):
        pid = run.live_workers()[name]
        os.kill(pid, signal.SIGKILL)
        run.until_restarted(name, pid)
    assert processes_of(name) == [run.live_workers()[name]]
    code, error, lines = scale(0)
    assert (code, error, lines[-1]) == (0, "", "2 workers were drained")
    run.until(lambda: run.live_workers().keys() == {"worker-0"})
    assert run.process
    run.process.send_signal(signal.SIGINT)
    code, out = run.end()
    assert (code, "the run was stopped" in out) == (130, True)
    run.check_nothing_left()


def test_missing_resources_are_named_and_ctrl_c_ends_the_wait(run: RunOnRay) -> None:
    run.start("--set", "ray.engine_cpus=100")
    run.until(lambda: "engine-0: waiting for 100 CPUs: 8 registered, 8 free" in run.log())
    assert run.process
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    run.check_nothing_left()


def test_nothing_is_left_when_the_driver_is_killed(run: RunOnRay) -> None:
    run.start()
    run.until_step(1)
    assert run.process
    run.process.kill()
    run.process.wait()
    run.check_nothing_left()


def test_secrets_are_in_no_argument_and_no_environment_of_an_actor(run: RunOnRay) -> None:
    run.start("--set", "trainer.num_steps=100000")
    run.until_step(1)
    keys = [msgspec.json.decode(path.read_bytes()) for path in run.run.glob("keys/*-*.json")]
    secrets = [key["secret"] for key in keys]
    secrets.append((run.run / "keys" / "engine.key").read_text().strip())
    for process in psutil.process_iter():
        try:
            shown = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        assert not any(secret in text for secret in secrets for text in shown), process
    assert run.process
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130


def test_a_detached_run_survives_its_launch_and_is_stopped_by_name(run: RunOnRay) -> None:
    argv = [sys.executable, "-m", "rollmesh.cli.main", "up", "--on", "ray"]
    argv += ["--set", "trainer.num_steps=100000"]

    def verb(option: str) -> str:
        done = subprocess.run([*argv, option], cwd=run.folder, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert verb("--detach").startswith("run mesh is on the cluster; its output: ")
    run.until_step(2)
    for lost in (lambda pid: pid, lambda pid: psutil.Process(pid).ppid()):  # launch, its actor
        launch = run.pid("launch")
        os.kill(lost(launch), signal.SIGKILL)
        num_steps = len(run.rows("metrics.jsonl"))
        run.until_step(num_steps + 1)
        assert run.pid("launch") != launch
    assert verb("--down") == "run mesh was stopped\n"
    run.check_nothing_left()


def test_ranks_with_places_of_their_own_train_together_and_survive_the_loss_of_one(
    run: RunOnRay,
) -> None:
    run.start("--set", "trainer.num_ranks=2", "--set", "trainer.num_local_ranks=1")
    run.until_step(3)
    os.kill(run.pid("rank-1"), signal.SIGKILL)
    code, out = run.end()
    assert code == 0, out
    assert "rank-1 was killed by signal 9" in out
    run.check_complete()
    run.check_nothing_left()


def test_sglang_servers_are_placed_and_restarted_with_their_node(
    run: RunOnRay, cluster: Any
) -> None:
    python = write_sglang_python(run.folder)
    sglang = ["engine.launch=sglang", f"engine.python={python}", "engine.gpus_each=0"]
    run.start(*[word for each in sglang for word in ("--set", each)])
    run.until_step(4)
    cluster.remove_node(raylet_of(run.pid("engine-0"), cluster), allow_graceful=False)
    cluster.add_node(**_node(4))
    code, out = run.end()
    assert code == 0, out
    run.check_complete()
    run.check_nothing_left()
