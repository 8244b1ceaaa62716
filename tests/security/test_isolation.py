"""A harness program that tries to reach keys, siblings, the engine and the host."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import Outcome
from rollmesh.envs.program import Command, run_program
from rollmesh.envs.scratch import new_scratch
from rollmesh.serve.client.arrivals import Finished
from rollmesh.serve.client.client import RolloutClient
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys, read_keys
from tests.flow.worker_mesh import ask, open_mesh, take

ADMIN_TOKEN = "open-sesame"
LEFTOVER = "left-behind-by-an-agent"
SYSTEM_PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/")

ATTACK = """
import glob, json, os, signal, sys, urllib.request
told = json.loads(sys.argv[1])
reached = []

def attempt(name, action):
    try:
        found = action()
    except Exception:
        return
    if found:
        reached.append(name)

def status(url, **words):
    request = urllib.request.Request(url, **words)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.status

own = os.environ["OPENAI_API_KEY"].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    def environ():
        text = open(f"/proc/{pid}/environ", "rb").read()
        is_siblings = b"OPENAI_API_KEY=" in text and own not in text
        return is_siblings or told["token"].encode() in text or b"ROLLMESH_KEYS" in text
    attempt("environ", environ)
    if int(pid) == told["worker"]:
        attempt("memory", lambda: open(f"/proc/{pid}/mem", "rb"))
        attempt("kill", lambda: os.kill(int(pid), 0) is None and not told["is_in_namespace"])
attempt("key_file", lambda: open(told["keys"]).read())
attempt("run_folder", lambda: os.listdir(told["folder"]))
home = os.path.dirname(os.environ["HOME"])
for folder in glob.glob(os.path.dirname(home) + "/rollmesh-*"):
    if folder != home:
        attempt("sibling", lambda: os.listdir(os.path.join(folder, "work")))
        attempt("sibling", lambda: open(os.path.join(folder, "work", "forged"), "w"))
root = os.environ["ANTHROPIC_BASE_URL"]
attempt("engine", lambda: status(told["engine"] + "/model_info"))
attempt("metrics", lambda: status(root + "/metrics"))
attempt("admin", lambda: status(root + "/admin/sessions", data=b"{}"))
bearer = {"Authorization": "Bearer " + "0" * 43, "Content-Type": "application/json"}
body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
chat = root + "/v1/chat/completions"
attempt("other_session", lambda: status(chat, data=json.dumps(body).encode(), headers=bearer))
attempt("system", lambda: open("/usr/planted", "w"))
os.symlink(told["keys"], "answer.txt")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        wait = "import signal; signal.pause()"
        os.execve(sys.executable, [sys.executable, "-c", wait, told["leftover"]], {})
    os._exit(0)
os.wait()
bearer["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
calls = status(chat, data=json.dumps(body).encode(), headers=bearer)
print(json.dumps({"calls": calls, "reached": reached, "uid": os.getuid()}))
"""

ENV = """
import json
from rollmesh.envs import read_text
from rollmesh.envs.harness import HarnessEnv

class TheEnv(HarnessEnv):
    def __init__(self):
        told = {told!r}
        told["worker"] = os.getpid()
        argv = [{python!r}, "-c", {attack!r}, json.dumps(told)]
        super().__init__(argv=argv, timeout_s=90)
        self.met = asyncio.Barrier(2)

    def tasks(self, split, seed):
        yield Task(id="t")

    async def prepare(self, task, work):
        await self.met.wait()

    async def collect(self, task, work):
        await self.met.wait()
        try:
            return dict(answer=read_text(work, "answer.txt"))
        except OSError:
            return dict(answer="")

    def score(self, task, transcript):
        lines = transcript.data["output"].splitlines()
        found = json.loads(lines[-1])
        metrics = dict(calls=found["calls"], uid=found["uid"])
        metrics["answer"] = len(transcript.data["answer"])
        return Score(0.0, dict(metrics, **dict.fromkeys(found["reached"], 1.0)))
"""


@pytest.fixture(params=["bwrap", "uid", "spawner"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "bwrap":
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        probe = subprocess.run(["bwrap", *NAMESPACES, "true"], capture_output=True, check=False)
        if probe.returncode:
            pytest.skip(f"no namespaces for bubblewrap: {probe.stderr.decode().strip()}")
    elif os.geteuid() != 0:
        pytest.skip("only root may become another user")
    mode: str = request.param
    return mode


@pytest.fixture
def open_folder(mode: str, tmp_path: Path) -> Iterator[Path]:
    """A folder that a worker of user 65534 can reach; the key in it is root's."""
    if mode != "spawner":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="attack-", dir="/tmp") as name:
        os.chown(name, 0, 65534)
        os.chmod(name, 0o750)
        yield Path(name)


async def test_a_program_that_tries_everything_reaches_nothing_and_scores_zero(
    mode: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = open_folder
    new_keys(tmp_path / "mesh.json")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "mesh.json"))
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN", ADMIN_TOKEN)
    keys = read_keys()
    async with open_mesh(tmp_path) as mesh:
        told = {
            "keys": str(tmp_path / "mesh.json"),
            "folder": str(tmp_path),
            "engine": mesh.engine.url,
            "token": ADMIN_TOKEN,
            "leftover": LEFTOVER,
            "is_in_namespace": mode == "bwrap",
        }
        env = mesh.write_env("attack", ENV.format(told=told, python=SYSTEM_PYTHON, attack=ATTACK))
        if mode == "spawner":
            mesh.confined_worker("w1", env, isolation="uid")
            mode = "uid"
        else:
            mesh.worker("w1", env, isolation=mode)
        folder = tmp_path / "client"
        client = RolloutClient(mesh.router.ready.address, JournalConfig(), folder, keys)
        client.start()
        try:
            ask(client, num_samples=2, env=env)
            [arrival] = await take(client)
        finally:
            client.close()
        assert isinstance(arrival, Finished), arrival
        rollouts = arrival.record.rollouts
        expected: dict[str, Any] = {"calls": 200, "answer": 0}
        if mode == "uid":
            expected["engine"] = 1.0  # no network isolation, as documented
        for rollout in rollouts:
            assert (rollout.outcome, rollout.error) == (Outcome.COMPLETED, "")
            uid = rollout.metrics.pop("uid")
            assert uid == os.geteuid() or mode == "uid"
            assert (rollout.reward, rollout.metrics) == (0.0, expected)
        assert not processes_named(LEFTOVER)
        await mesh.until(lambda: mesh.worker_status("w1")["isolation"] == mode)


def processes_named(word: str) -> list[str]:
    """The processes of this machine with `word` as an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(path.parent.name)
    return found


async def test_without_isolation_a_program_reads_a_file_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("found")
    code = "import sys; print(open(sys.argv[1]).read())"
    async with new_scratch() as scratch:
        argv = (SYSTEM_PYTHON, "-c", code, str(tmp_path / "secret"))
        ended = await run_program(Command(argv, scratch.work, {}), 60.0, 1000)
    assert ended.output == "found\n"
