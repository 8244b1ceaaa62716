"""Logs and output of a process have no registered secret, and no control character on a
terminal.
"""

import os
import pty
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.redaction import redact, register_content, register_secret
from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model

TITLE, CLIPBOARD, CLEAR, REORDER = "\x1b]0;PWNED\x07", "\x1b]52;c;UFdORUQ=\x07", "\x1b[2J", "\u202e"
ATTACK = f"{TITLE}{CLIPBOARD}{CLEAR}\x9b2J{REORDER}"
PATIENCE_S = 100

LEAKY = """
import os, sys, logging
from rollmesh import Env, Score, Task, Transcript
from rollmesh.core.secret_files import handed

class Leaky(Env):
    def tasks(self, split, seed):
        yield Task(id="t")
    async def run(self, task, agent):
        token = handed("ROLLMESH_ADMIN_TOKEN") or os.environ.get("ROLLMESH_ADMIN_TOKEN", "")
        assert token
        for text in (token, agent.api_key, agent.base_url):
            print("printed", text, flush=True)
            print("printed", text, file=sys.stderr, flush=True)
            logging.getLogger("agent").warning("logged %s", {"nested": {"x": text}})
            with open("secrets.txt", "a") as file:
                print(text, file=file)
        try:
            raise ValueError(token + agent.api_key)
        except ValueError:
            logging.getLogger("agent").exception("failed")
            sys.excepthook(*sys.exc_info())
        return Transcript(data={})
    def score(self, task, transcript):
        return Score(reward=1.0)
"""


def on_terminal(argv: list[str], folder: Path) -> str:
    """The bytes that a command writes to its terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    with subprocess.Popen(
        argv, cwd=folder, stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = b""
        while block := _read(ours):
            written += block
        process.wait(PATIENCE_S)
    os.close(ours)
    return written.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # On Linux, a terminal without writers ends with EIO.
        return b""


def rollmesh(*args: str) -> list[str]:
    return [sys.executable, "-m", "rollmesh.cli.main", *args]


def assert_harmless(shown: str) -> None:
    assert "PWNED" in shown
    for sequence in (TITLE, CLIPBOARD, CLEAR, "\x1b]", "\x07", "\x9b", REORDER):
        assert sequence not in shown


def test_status_writes_no_control_sequence_of_an_agent_to_the_terminal(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"run": {"name": "demo"}, "trainer": {"num_steps": 3}}')
    worker = {"worker_id": f"w{ATTACK}", "state": "live", "env": f"e{ATTACK}"}
    worker |= {"last_error": f"ValueError: {ATTACK}", "last_task_id": ATTACK, "waits_for": ATTACK}
    engine = {"url": f"http://x/{ATTACK}", "phase": "ready", "detail": ATTACK}
    router = {"workers": [worker], "engines": [engine], "causes": [f"cause {ATTACK}"]}
    row = {"time_s": 1.0, "processes": [], "router": router}
    (run / "telemetry.jsonl").write_bytes(msgspec.json.encode(row) + b"\n")
    (run / "state.json").write_bytes(
        msgspec.json.encode({"state": "killed", "cause": f"exit: {ATTACK}", "resume": ATTACK})
    )
    assert_harmless(on_terminal(rollmesh("status"), tmp_path))


@pytest.mark.slow
def test_play_writes_no_control_sequence_of_a_model_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "from rollmesh import Env, Score, Task, Transcript\n"
        f"ATTACK = {ATTACK!r}\n"
        "class Loud(Env):\n"
        "    def tasks(self, split, seed):\n"
        "        yield Task(id='t' + ATTACK)\n"
        "    async def run(self, task, agent):\n"
        "        await agent.openai().chat.completions.create(model=agent.model,\n"
        "            messages=[{'role': 'user', 'content': 'say ' + ATTACK}], max_tokens=4)\n"
        "        raise ValueError('broken ' + ATTACK)\n"
        "    def score(self, task, transcript):\n"
        "        return Score(reward=0.0)\n"
    )
    args = ("play", "loud:Loud", "--set", "worker.num_infra_retries=0")
    assert_harmless(on_terminal(rollmesh(*args), tmp_path))


def test_the_console_log_escapes_control_characters() -> None:
    code = (
        "from rollmesh.core import logs; logs.setup('router', None, on_console=True)\n"
        "import logging\n"
        f"attack = {ATTACK!r}\n"
        "logs.get_logger().warning('peer.refused', name=attack, more=[attack])\n"
        "logging.getLogger('aiohttp').error('bad ' + attack)\n"
        "try:\n    raise ValueError(attack)\n"
        "except ValueError:\n    logs.get_logger().exception('door.failed')\n"
    )
    assert_harmless(on_terminal([sys.executable, "-c", code], Path.cwd()))


def test_no_secret_of_a_process_is_in_its_logs_or_its_output_file(tmp_path: Path) -> None:
    token = "correct.horse-battery"
    (tmp_path / "leaky.py").write_text(LEAKY)
    write_tiny_model(tmp_path / "model", texts_of(GuessEnv()), TinyShape(), seed=0)
    environment = {**os.environ, "ROLLMESH_ADMIN_TOKEN": token}
    args = ["eval", "--env", "leaky:Leaky", "--model-dir", "model", "--num-tasks", "1"]
    done = subprocess.run(
        rollmesh(*args, "--set", "worker.num_workers=1"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {each.name: each.read_text() for each in (tmp_path / "runs/eval/mesh/logs").iterdir()}
    assert "printed" in logs["worker-0.out"]
    assert "ValueError" in logs["worker-0.out"]
    assert "logged" in logs["worker-0.log"]
    lines = (tmp_path / "secrets.txt").read_text().split()
    secrets = {token, *(line for line in lines if line.startswith("sk-"))}
    assert len(secrets) == 2
    for name, text in logs.items():
        assert [secret for secret in secrets if secret in text] == [], name


def test_registered_secrets_are_hidden_in_every_form_and_others_by_patterns() -> None:
    register_secret('pass"w\xf6rd/1')
    register_content('{"hub_public": "public-part-of-key", "hub_secret": "z85(secret)%part"}')
    text = 'a pass"w\xf6rd/1 b pass\\"w\\u00f6rd/1 c pass%22w%C3%B6rd%2F1 d z85(secret)%part'
    assert redact(text) == "a [hidden] b [hidden] c [hidden] d [hidden]"
    assert redact("public-part-of-key") == "public-part-of-key"
    long = "AbCdEfGhIjKlMnOpQrStUv"
    for form in (
        f"Authorization: Basic {long}",
        f"BEARER {long}",
        f"x-goog-api-key: {long}",
        f"{{'api-key': '{long}'}}",
        f"https://user:{long}@host/",
        f"http://host/?key={long}",
        f"%2Fs%2F{long}",
        f"sk-abc.{long}",
        f"upstream_token={long}",
    ):
        assert long not in redact(form), form
    assert redact("router.started step=3 http://127.0.0.1:3000/x") == (
        "router.started step=3 http://127.0.0.1:3000/x"
    )
