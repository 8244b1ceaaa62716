"""A harness program that tries to reach keys, siblings, the engine and the host."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.core.process import RECYCLED
from rollmesh.core.types import Outcome
from rollmesh.envs import spawner
from rollmesh.envs.program import Command, run_program
from rollmesh.envs.scratch import new_scratch
from rollmesh.envs.spawning import ENDED
from rollmesh.serve.client.arrivals import Finished
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys, read_keys
from tests.flow.test_without_mesh import rollmesh
from tests.flow.worker_mesh import Mesh, ask, leaves, open_mesh, take
from tests.house.skips import needs_shared_python
from tests.house.source import ROOT

ADMIN_TOKEN = "open-sesame"
ENGINE_KEY = "the-key-of-the-engines"
LEFTOVER = "left-behind-by-an-agent"
MAX_TOKENS = 3
"""Tokens of each call by ATTACK."""
SYSTEM_PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/")

ATTACK = """
import ctypes, errno, glob, json, os, re, signal, socket, sys, urllib.request
from urllib.parse import urlsplit
facts = json.loads(sys.argv[1])
reached = []

def attempt(name, action):
    try:
        found = action()
    except Exception:
        return
    if found:
        reached.append(name)

def status(url, **options):
    request = urllib.request.Request(url, **options)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.status

def inspect(pid):
    PTRACE_SEIZE = 0x4206
    return libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0

def read_memory(pid):
    here = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(here), 8)
    remote = (ctypes.c_size_t * 2)(0x10000, 8)
    done = libc.process_vm_readv(pid, local, 1, remote, 1, 0)
    # An address that is not mapped is looked up only after the right to read was checked.
    return done > 0 or ctypes.get_errno() == errno.EFAULT

def connect(url):
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=20):
        return True

def call(key):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return status(chat, data=json.dumps(body).encode(), headers=headers)

def send(path, message, key):
    # Whatever an engine that takes the request answers, the request has reached it.
    headers = {"Authorization": "Bearer " + key} if key else {}
    try:
        return status(facts["engine"] + path, data=json.dumps(message).encode(), headers=headers)
    except urllib.error.HTTPError as error:
        return error.code not in (401, 403)

root = os.environ["ANTHROPIC_BASE_URL"]
chat = root + "/v1/chat/completions"
body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
libc = ctypes.CDLL(None, use_errno=True)
own = os.environ["OPENAI_API_KEY"].encode()
call(own.decode())
found = set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    def environ():
        text = open(f"/proc/{pid}/environ", "rb").read()
        keys = set(re.findall(rb"OPENAI_API_KEY=([^\\0]+)", text)) - {own}
        found.update(keys)
        secrets = (facts["token"].encode(), b"ROLLMESH_KEYS", b"ROLLMESH_ENGINE_KEY")
        return keys or any(each in text for each in secrets)
    attempt("environ", environ)
    try:
        is_ours = os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        continue
    if not is_ours:
        attempt("ptrace", lambda: inspect(int(pid)))
        attempt("process_vm_readv", lambda: read_memory(int(pid)))
        attempt("folder", lambda: os.listdir(f"/proc/{pid}/cwd"))
        attempt("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
    if int(pid) == facts["worker"]:
        attempt("memory", lambda: open(f"/proc/{pid}/mem", "rb"))
        attempt("kill", lambda: os.kill(int(pid), 0) is None and not facts["is_in_namespace"])
attempt("key_file", lambda: open(facts["keys"]).read())
attempt("run_folder", lambda: os.listdir(facts["folder"]))
home = os.path.dirname(os.environ["HOME"])
for folder in glob.glob(os.path.dirname(home) + "/rollmesh-*"):
    if folder != home:
        attempt("sibling", lambda: os.listdir(os.path.join(folder, "work")))
        attempt("sibling", lambda: open(os.path.join(folder, "work", "forged"), "w"))
for key in found:
    attempt("call_as_sibling", lambda: call(key.decode()))
for key in {"", *os.environ.values()}:
    attempt("engine", lambda: send("/generate", {"input_ids": [1]}, key))
    attempt("engine", lambda: send("/model_info", {}, key))
    weights = {"model_path": "/", "weight_version": "666", "new_version": "666"}
    for name in ("s_from_disk", "s_from_tensor", "s_from_distributed", "_version"):
        attempt("weights", lambda: send("/update_weight" + name, weights, key))
    attempt("weights", lambda: send("/stage_weights", weights, key))
attempt("router", lambda: connect(facts["router"]))
attempt("metrics", lambda: status(root + "/metrics"))
attempt("admin", lambda: status(root + "/admin/sessions", data=b"{}"))
attempt("other_session", lambda: call("0" * 43))
attempt("system", lambda: open("/usr/planted", "w"))
os.symlink(facts["keys"], "answer.txt")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        wait = "import signal; signal.pause()"
        os.execve(sys.executable, [sys.executable, "-c", wait, facts["leftover"]], {})
    os._exit(0)
os.wait()
print(json.dumps({"calls": call(own.decode()), "reached": reached, "uid": os.getuid()}))
"""

ENV = """
import json
from rollmesh.envs import read_text
from rollmesh.envs.harness import HarnessEnv

class TheEnv(HarnessEnv):
    def __init__(self):
        facts = {facts!r}
        facts["worker"] = os.getpid()
        argv = [{python!r}, "-c", {attack!r}, json.dumps(facts)]
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


FORGE = """
import json, sys, time
import zmq
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.wire.frames import encode_record
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys, Role
from rollmesh.wire.messages import GroupFinished, WorkerHello
from rollmesh.wire.sockets import SERVER_KEY, Dialer, wait

facts, asked = json.loads(sys.argv[1]), json.load(open("asked.json"))
public, secret = (each.decode() for each in zmq.curve_keypair())
own_pair = Keys(
    name="mallory", role=Role.WORKER, public=public, secret=secret, hub_public=facts["hub_public"]
)
rollouts = [RolloutRecord(index=at, outcome=Outcome.COMPLETED, reward=1.0) for at in range(2)]
body = encode_record(GroupRecord(task=Task(id="t"), rollouts=rollouts))
sink, _, _ = asked["sink"].partition(SERVER_KEY)
dialers = []
for keys, address in ((None, sink), (own_pair, asked["sink"])):
    router = Dialer(facts["router"], "mallory", keys)
    router.send(Packet(WorkerHello("mallory", asked["env_name"], 10_000, 0, "here")))
    results = Dialer(address, "mallory", keys)
    for ticket in (b"", bytes(16)):
        finished = GroupFinished(GroupId(asked["run_id"], 0), 1, "mallory", True, ticket)
        results.send(Packet(finished, "", body, (b"", b"")))
    dialers += [router, results]
num_answers, end_s = 0, time.monotonic() + 2.0
while time.monotonic() < end_s:
    wait(dialers, None, 0.1)
    num_answers += sum(len(list(each.receive())) for each in dialers)
print(json.dumps({"answers": num_answers}))
"""

FORGING_ENV = """
import json
from rollmesh.envs.harness import HarnessEnv

class TheEnv(HarnessEnv):
    def __init__(self):
        argv = [{python!r}, "-c", {forge!r}, json.dumps({facts!r})]
        super().__init__(argv=argv, timeout_s=90, read_only={packages!r})

    def tasks(self, split, seed):
        yield Task(id="t")

    async def prepare(self, task, work):
        (work / "asked.json").write_text(json.dumps(task.data))

    def score(self, task, transcript):
        return Score(0.0, json.loads(transcript.data["output"].splitlines()[-1]))
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
    else:
        needs_shared_python()
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
    monkeypatch.setenv("ROLLMESH_ENGINE_KEY", ENGINE_KEY)
    keys = read_keys()
    async with open_mesh(tmp_path) as mesh:
        env = write_attack(mesh, is_in_namespace=mode == "bwrap")
        if mode == "spawner":
            mesh.confined_worker("w1", env, isolation="uid")
            mode = "uid"
        else:
            mesh.worker("w1", env, isolation=mode)
        client = mesh.client(keys)
        mesh.engine.hold()
        ask(client, num_samples=2, env=env)
        await run_together(mesh.engine)
        [arrival] = await take(client)
        assert isinstance(arrival, Finished), arrival
        rollouts = arrival.record.rollouts
        expected: dict[str, Any] = {"calls": 200, "answer": 0}
        if mode == "uid":
            # No network isolation, as documented: the port is reached, and messages need keys.
            expected["router"] = 1.0
        for rollout in rollouts:
            assert (rollout.outcome, rollout.error) == (Outcome.COMPLETED, "")
            uid = rollout.metrics.pop("uid")
            assert uid == os.geteuid() or mode == "uid"
            assert (rollout.reward, rollout.metrics) == (0.0, expected)
        assert not processes_named(LEFTOVER)
        await mesh.until(lambda: mesh.worker_status("w1")["isolation"] == mode)


def write_attack(mesh: Mesh, *, is_in_namespace: bool) -> str:
    """Write the environment whose programs are ATTACK, and let the engine require its key."""
    mesh.engine.api_key = ENGINE_KEY
    facts = {
        "keys": str(mesh.folder / "mesh.json"),
        "folder": str(mesh.folder),
        "engine": mesh.engine.url,
        "router": mesh.router.ready.address,
        "token": ADMIN_TOKEN,
        "leftover": LEFTOVER,
        "is_in_namespace": is_in_namespace,
    }
    return mesh.write_env("attack", ENV.format(facts=facts, python=SYSTEM_PYTHON, attack=ATTACK))


async def run_together(engine: ScriptedEngine) -> None:
    """Start two attacks once both have called the held model, and end once both call again."""
    await engine.until(lambda: engine.num_live == 2)
    await engine.allow(2 * MAX_TOKENS)
    await engine.until(lambda: engine.num_sampled == 2 * MAX_TOKENS and engine.num_live == 2)
    await engine.release()


@pytest.mark.slow
async def test_without_isolation_a_program_calls_the_model_as_its_sibling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_ENGINE_KEY", ENGINE_KEY)
    async with open_mesh(tmp_path) as mesh:
        env = write_attack(mesh, is_in_namespace=False)
        mesh.worker("w1", env, isolation="none")
        mesh.engine.hold()
        client = mesh.client()
        ask(client, num_samples=2, env=env)
        await run_together(mesh.engine)
        [arrival] = await take(client)
        assert isinstance(arrival, Finished), arrival
        for rollout in arrival.record.rollouts:
            assert {"environ", "sibling", "call_as_sibling"} <= set(rollout.metrics)
    for pid in processes_named(LEFTOVER):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
async def test_a_program_that_joins_as_a_worker_gets_no_group_and_sets_no_reward(
    mode: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = open_folder
    new_keys(tmp_path / "mesh.json")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "mesh.json"))
    keys = read_keys()
    assert keys is not None
    async with open_mesh(tmp_path) as mesh:
        facts = {"router": mesh.router.ready.address, "hub_public": keys.hub_public}
        packages = [sysconfig.get_path("purelib"), str(ROOT / "rollmesh")]
        source = FORGING_ENV.format(
            facts=facts, python=sys.executable, packages=packages, forge=FORGE
        )
        env = mesh.write_env("forging", source)
        if mode == "spawner":
            mesh.confined_worker("w1", env, isolation="uid")
        else:
            mesh.worker("w1", env, isolation=mode)
        client = mesh.client(keys)
        ask(client, env=env, sink=client.address, env_name=env, run_id=client.run_id)
        [arrival] = await take(client)
        assert isinstance(arrival, Finished), arrival
        for rollout in arrival.record.rollouts:
            assert (rollout.outcome, rollout.error) == (Outcome.COMPLETED, "")
            assert (rollout.reward, rollout.metrics) == (0.0, {"answers": 0.0})
        assert [each["worker_id"] for each in mesh.status()["workers"]] == ["w1"]


@pytest.mark.parametrize("mode", ["spawner"], indirect=True)
async def test_a_worker_whose_spawner_was_killed_leaves(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    new_keys(open_folder / "mesh.json")
    monkeypatch.setenv(KEYS_VARIABLE, str(open_folder / "mesh.json"))
    async with open_mesh(open_folder) as mesh:
        worker = mesh.confined_worker("w1", "echo", isolation="uid")
        # Not by `children()` of psutil, which loses children whenever the clock is corrected.
        spawners = map(psutil.Process, processes_named(spawner.__file__))
        [process] = [each for each in spawners if each.ppid() == worker.ready.pid]
        process.kill()
        assert await leaves(worker) == RECYCLED
        assert ENDED in capfd.readouterr().err


def processes_named(arg: str) -> list[int]:
    """Pids of this machine's processes with the argument `arg`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if arg.encode() in argv:
            found.append(int(path.parent.name))
    return found


READER_ENV = """
from rollmesh.core.types import Score, Task
from rollmesh.envs.harness import HarnessEnv

CODE = {code!r}

class TheEnv(HarnessEnv):
    def __init__(self):
        super().__init__(argv=({python!r}, "-c", CODE))

    def tasks(self, split, seed):
        yield Task(id="t")

    async def score(self, task, transcript):
        return Score(reward=float(transcript.data["output"] == "four, and nothing"))
"""
READER = """
import json, os, urllib.request
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]}}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
try:
    found = open("{secret}").read()
except OSError:
    found = "nothing"
print(answer["choices"][0]["message"]["content"], found, sep=", and ", end="")
"""


@pytest.mark.parametrize("mode", ["bwrap"], indirect=True)
@pytest.mark.parametrize("verb", ["play", "eval"])
async def test_programs_of_a_verb_without_workers_are_isolated(
    verb: str, mode: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("a secret")
    code = READER.format(secret=tmp_path / "secret")
    (tmp_path / "reading.py").write_text(READER_ENV.format(code=code, python=SYSTEM_PYTHON))
    async with ChatEndpoint(lambda _: ChatAnswer("four")) as served:
        env = ["reading:TheEnv"] if verb == "play" else ["--env", "reading:TheEnv"]
        args = [*env, "--base-url", served.endpoint.base_url, "--set", f"worker.isolation={mode}"]
        exit_code, out, err = await rollmesh(tmp_path, verb, *args, PYTHONPATH=str(tmp_path))
    assert exit_code == 0, err
    assert re.search(r"reward +1", out), out


async def test_without_isolation_a_program_reads_a_file_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("found")
    code = "import sys; print(open(sys.argv[1]).read())"
    async with new_scratch() as scratch:
        argv = (SYSTEM_PYTHON, "-c", code, str(tmp_path / "secret"))
        ended = await run_program(Command(argv, scratch.work, {}), 60.0, 1000)
    assert ended.output == "found\n"
