"""Number of package files that one chat completion and one finished group cross.

    python -m benchmarks.files_crossed [--quick] [--json] [--check] [--only CASE,...] [--list]

    completion   the second, streamed turn of a conversation, in `rollmesh gateway`
    group        a finished group: in its worker from the score to the acknowledgement, and in the
                 trainer from the arrival to the optimiser's step

Processes are the real ones; a profile function that Python's `sitecustomize` installs records in
which files functions are called. A file counts if every repetition crosses it, so that heartbeats
and probes do not count. Files of rollmesh/core are not counted.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.process import Ready
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder

NUM_TRIES, NUM_QUICK_TRIES = 10, 3
START, STOP = signal.SIGUSR1, signal.SIGUSR2
LOOK_S = 0.01
PATIENCE_S = 120.0
GOALS = [Goal("completion_files", "<=", 30), Goal("group_files", "<=", 24)]
WORKER_STAGE = ["guess.py:score", "outbox.py:_acked"]
TRAINER_STAGE = ["intake.py:_receive_result", "policy.py:step"]
"""Functions, as FILE:NAME, whose calls begin and end a stage."""
RECORDER = """
import json, os, signal, sys, threading

OUT, STAGES = os.environ["FILES_CROSSED_OUT"], json.loads(os.environ["FILES_CROSSED_STAGES"])
BEGINS, ENDS = {begin for begin, _ in STAGES}, dict((end, begin) for begin, end in STAGES)
PACKAGE = os.environ["FILES_CROSSED_PACKAGE"]
crossed = {}

def write(begin):
    files = crossed.pop(begin, None)
    if files:
        with open(f"{OUT}/{os.getpid()}.{threading.get_ident()}.jsonl", "a") as file:
            file.write(json.dumps({"stage": begin, "files": sorted(files)}) + "\\n")

def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
        path = frame.f_code.co_filename
        name = path[path.rindex("/") + 1 :] + ":" + frame.f_code.co_name
        if name in BEGINS:
            crossed[name] = set()
        for files in crossed.values():
            files.add(path)
        if name in ENDS:
            write(ENDS[name])

signal.signal(signal.SIGUSR1, lambda *_: crossed.update({"signal": set()}))
signal.signal(signal.SIGUSR2, lambda *_: write("signal"))
threading.setprofile(profile)
sys.setprofile(profile)
"""
"""The sitecustomize.py of the recorded processes."""


class Recorder:
    """Record the processes that are started with `env`."""

    def __init__(self, folder: Path, stages: list[list[str]]) -> None:
        self.out = folder / "crossed"
        self.out.mkdir()
        hook = folder / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(RECORDER)
        package = Path(__file__).parents[1]
        self._package = f"{package}/rollmesh/"
        self.env = os.environ | {
            "PYTHONPATH": f"{hook}:{package}",
            "FILES_CROSSED_OUT": str(self.out),
            "FILES_CROSSED_STAGES": json.dumps(stages),
            "FILES_CROSSED_PACKAGE": self._package,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the recorded stages: their names and files."""
        lines = [line for file in self.out.glob("*.jsonl") for line in file.open()]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def crossed(self, stage: str) -> set[str]:
        """Return the files that every repetition of the stage crossed, without those of core."""
        each = [set(row["files"]) for row in self.rows() if row["stage"] == stage]
        names = {path.removeprefix(self._package) for path in set.intersection(*each)}
        return {name for name in names if not name.startswith("core/")}


def completion(num_tries: int) -> set[str]:
    """Return the files that a streamed second turn crosses in a gateway."""
    return asyncio.run(_completion(num_tries))


async def _completion(num_tries: int) -> set[str]:
    async with ScriptedEngine(_letter) as engine:
        return await asyncio.to_thread(_conversations, engine.url, num_tries)


def _letter(policy_version: int, context: Sequence[int]) -> int:
    """Choose the next token from the vocabulary's printable bytes, by the context."""
    return 40 + zlib.crc32(repr((policy_version, list(context))).encode()) % 40


def _conversations(engine_url: str, num_tries: int) -> set[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(folder, [])
        write_model_folder(folder / "model")
        with _gateway(folder, engine_url, recorder.env) as (ready, pid, token):
            for number in range(num_tries):
                _converse(ready, token, pid, f"question {number}")
                _until(lambda n=number: len(recorder.rows()) > n)
        return recorder.crossed("signal")


@contextmanager
def _gateway(
    folder: Path, engine_url: str, env: dict[str, str]
) -> Iterator[tuple[Ready, int, str]]:
    """Start a recorded gateway; yield its addresses, its pid and its admin token."""
    token_file = folder / "admin.token"
    token_file.touch(0o600)
    token_file.write_text(token := secrets.token_urlsafe(32))
    reading, writing = os.pipe()
    argv = [sys.executable, "-m", "rollmesh.cli.main", "gateway", "--engine", engine_url]
    argv += ["--host", "127.0.0.1", "--port", "0", "--model-dir", str(folder / "model")]
    argv += ["--no-journal", "--admin-token-file", str(token_file), "--ready-fd", str(writing)]
    gateway = subprocess.Popen(argv, pass_fds=[writing], stdout=subprocess.DEVNULL, env=env)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            yield msgspec.json.decode(pipe.readline(), type=Ready), gateway.pid, token
    finally:
        gateway.terminate()
        gateway.wait()


def _converse(ready: Ready, token: str, pid: int, question: str) -> None:
    """Run two turns in a new session; the second one is recorded."""
    head = {"Authorization": f"Bearer {token}"}
    sessions = f"{ready.http_address or ready.address}/admin/sessions"
    opened = httpx.post(sessions, json={"metadata": {}}, headers=head).raise_for_status().json()
    with httpx.Client(
        base_url=opened["base_url"] + "/", headers={"Authorization": f"Bearer {opened['api_key']}"}
    ) as client:
        messages = [{"role": "user", "content": question}]
        messages.append({"role": "assistant", "content": _turn(client, messages)})
        messages.append({"role": "user", "content": "and then?"})
        os.kill(pid, START)
        _turn(client, messages)
        os.kill(pid, STOP)


def _turn(client: httpx.Client, messages: list[dict[str, str]]) -> str:
    body = {"model": "policy", "messages": messages, "stream": True, "max_tokens": 8}
    text = ""
    with client.stream("POST", "chat/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += "".join(each["delta"].get("content") or "" for each in choices)
    return text


def group(num_tries: int) -> set[str]:
    """Return the files that a finished group crosses in the worker and in the trainer of a demo."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(folder, [WORKER_STAGE, TRAINER_STAGE])
        values = {
            "run.folder": folder,
            "trainer.num_steps": num_tries,
            "trainer.groups_per_step": 4,
            "trainer.samples_per_group": 2,
            "trainer.max_running_groups": 1,
            "trainer.eval_rollouts": 0,
        }
        argv = [sys.executable, "-m", "rollmesh.cli.main", "demo", "--no-live"]
        argv += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=recorder.env)
        stages = (WORKER_STAGE, TRAINER_STAGE)
        return set().union(*(recorder.crossed(begin) for begin, _ in stages))


def _until(condition: Any) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise RuntimeError("the recorded process wrote nothing")
        time.sleep(LOOK_S)


CASES = {"completion": completion, "group": group}


def main() -> None:
    """Run the cases and report."""
    arguments: argparse.ArgumentParser = parser("files_crossed", CASES)
    arguments.add_argument("--list", action="store_true", help="also print the files")
    options = arguments.parse_args()
    num_tries = NUM_QUICK_TRIES if options.quick else NUM_TRIES
    figures: dict[str, float] = {}
    for name in options.only or CASES:
        files = CASES[name](num_tries)
        if options.list:
            print(name, *sorted(files), sep="\n  ")
        figures[f"{name}_files"] = len(files)
    report(options, figures, [goal for goal in GOALS if goal.figure in figures])


if __name__ == "__main__":
    main()
