"""Command-line agents: their settings, what is withheld from them, and how their ends count."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.errors import AgentFailed, EnvError, InfraError
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.env import Endpoint, Transcript
from rollmesh.envs.harness import HarnessEnv

AGENT = Endpoint("http://127.0.0.1:9/v1", "sk-secret", "policy")
TASK = Task("t-1", {"question": "Why {model}?", "files": {"a/notes.txt": "zebra"}})


class RunsPython(HarnessEnv):
    """An agent that is a piece of Python code."""

    def __init__(self, code: str, *words: str, **settings: Any) -> None:
        super().__init__(argv=[sys.executable, "-c", code, *words], **settings)
        self.folders: list[Path] = []

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield TASK

    def collect(self, task: Task, work: Path) -> dict[str, Json]:
        self.folders.append(work)
        keys = [path.read_text() for path in work.glob("key")]
        return {
            "keys": keys,
            "left": sorted(str(path.relative_to(work)) for path in work.rglob("*")),
        }

    def score(self, task: Task, transcript: Transcript) -> Score:
        return Score(1.0)


REPORTS = """import json, os, sys
report = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
report["config"] = open(os.path.expanduser("~/.agent/config.json")).read()
report["notes"] = open("a/notes.txt").read()
open("answer.txt", "w").write("42")
print(json.dumps(report))
"""


async def test_the_program_gets_its_model_its_home_and_its_task() -> None:
    env = RunsPython(
        REPORTS,
        *("{question}", "{task_id}", "{api_key", "{other}"),
        files={".agent/config.json": '{"url": "{base_url}", "root": "{root_url}"}'},
        env={"EXTRA": "{model} in {work}", "TERM": "xterm"},
    )
    transcript = await env.run(TASK, AGENT)
    report = json.loads(transcript.data["output"])
    assert report["argv"] == ["Why {model}?", "t-1", "{api_key", "{other}"]
    assert report["config"] == '{"url": "http://127.0.0.1:9/v1", "root": "http://127.0.0.1:9"}'
    assert report["notes"] == "zebra"
    seen = report["env"]
    assert seen["OPENAI_BASE_URL"] == seen["OPENAI_API_BASE"] == AGENT.base_url
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == "[key]"
    assert seen["OPENAI_MODEL"] == seen["ANTHROPIC_MODEL"] == "policy"
    assert (seen["EXTRA"], seen["TERM"]) == (f"policy in {report['cwd']}", "xterm")
    home = Path(seen["HOME"])
    assert home != Path.home()
    assert home.parent == Path(report["cwd"]).parent
    assert transcript.data["exit_code"] == 0
    assert transcript.data["left"] == ["a", "a/notes.txt", "answer.txt"]
    assert not transcript.truncated
    assert not home.parent.exists()


async def test_the_program_sees_only_the_kept_environment_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    monkeypatch.setenv("KEPT", "1")
    code = "import os; print(*sorted(os.environ))"
    transcript = await RunsPython(code, keep_env=["KEPT", "NOT_THERE"]).run(TASK, AGENT)
    names = set(transcript.data["output"].split())
    assert "KEPT" in names
    assert not names & {"ROLLMESH_ADMIN_TOKEN", "HTTPS_PROXY", "NOT_THERE", "PATH"}


async def test_another_exit_code_is_the_agents_fault_and_quotes_its_last_line() -> None:
    code = "import sys; print('no model'); print(); sys.exit(3)"
    env = RunsPython(code)
    with pytest.raises(AgentFailed, match="ended with exit code 3: no model"):
        await env.run(TASK, AGENT)
    transcript = await RunsPython(code, exit_codes=[0, 3]).run(TASK, AGENT)
    assert transcript.data["exit_code"] == 3


async def test_the_sessions_key_is_removed_from_the_output() -> None:
    code = "import os, sys; key = os.environ['OPENAI_API_KEY']; open('key', 'w').write(key)"
    code += "; print(key, flush=True); sys.exit(f'401 for {key}')"
    env = RunsPython(code)
    with pytest.raises(AgentFailed, match=r"exit code 1: 401 for \[key\]"):
        await env.run(TASK, AGENT)
    env = RunsPython(code, exit_codes=[1])
    transcript = await env.run(TASK, AGENT)
    assert transcript.data["output"] == "[key]\n401 for [key]\n"
    assert transcript.data["keys"] == ["sk-secret"]


async def test_an_agent_killed_by_a_signal_is_reported_with_the_signal() -> None:
    with pytest.raises(AgentFailed, match="ended with signal 9"):
        await RunsPython("import os; os.kill(os.getpid(), 9)").run(TASK, AGENT)


async def test_overtime_truncates_and_collects_the_files() -> None:
    code = "import signal; open('half', 'w').close(); print('begun', flush=True); signal.pause()"
    for limit_s in (1.0, 10.0, 60.0):  # until the program has begun
        env = RunsPython(code, timeout_s=limit_s)
        transcript = await env.run(TASK, AGENT)
        if transcript.data["output"]:
            break
    assert transcript.truncated
    assert transcript.data["output"] == "begun\n"
    assert "half" in transcript.data["left"]
    assert not env.folders[0].exists()


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside"])
async def test_a_tasks_file_stays_in_its_folder(name: str) -> None:
    with pytest.raises(EnvError, match="not below its folder"):
        await RunsPython("").run(Task("t", {"files": {name: "x"}}), AGENT)


async def test_hooks_may_be_coroutines() -> None:
    class Waits(RunsPython):
        async def prepare(self, task: Task, work: Path) -> None:
            (work / "own").touch()

    transcript = await Waits("").run(TASK, AGENT)
    assert transcript.data["left"] == ["own"]


@pytest.mark.parametrize(
    ("argv", "settings", "why"),
    [
        ([], {}, "argv is empty"),
        (["sh"], {"timeout_s": 0}, "must be positive"),
        (["sh", 7], {}, "7 is none"),
        (["sh"], {"env": {"PORT": 80}}, "80 is none"),
        (["sh"], {"max_output_bytes": 0}, "must be positive"),
    ],
)
def test_invalid_harness_settings_are_refused(
    argv: Sequence[Any], settings: dict[str, Any], why: str
) -> None:
    class Fixed(RunsPython):
        def __init__(self) -> None:
            HarnessEnv.__init__(self, argv=argv, **settings)

    with pytest.raises(EnvError, match=why):
        Fixed()


async def test_a_missing_program_is_an_infra_error_when_it_runs() -> None:
    class Fixed(RunsPython):
        def __init__(self) -> None:
            HarnessEnv.__init__(self, argv=["no-such-agent"])

    env = Fixed()  # the trainer builds it too and reads its tasks
    with pytest.raises(InfraError, match="no-such-agent: cannot be run: No such file"):
        await env.run(TASK, AGENT)
