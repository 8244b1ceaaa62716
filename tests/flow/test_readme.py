"""Every code block of README.md runs unchanged."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from ruamel.yaml import YAML

from rollmesh.core.config import load_config
from rollmesh.core.model_folders import why_no_model
from rollmesh.core.process import listen
from tests.house.source import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHELL = {
    "make": "make demo",
    "agent": "rollmesh up",
    "eval": "rollmesh eval",
    "serve": "rollmesh gateway",
}
"""A phrase of each shell block; a test below runs each block."""
STEPS = re.compile(r"step ([1-9]\d*) of 200")
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONUNBUFFERED": "1",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def snippets(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def shell(name: str) -> str:
    [text] = [text for text in snippets("sh") if SHELL[name] in text]
    return text


def commands(name: str, verb: str = "") -> list[list[str]]:
    """Command lines of a block that begin with `verb`, without comments."""
    lines = [shlex.split(line, comments=True) for line in shell(name).splitlines()]
    return [line for line in lines if line[: len(verb.split())] == verb.split()]


def run(argv: list[str], folder: Path) -> str:
    """Run a command that must succeed; return its standard output."""
    ended = subprocess.run(
        argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def running(argv: list[str], folder: Path, ends_with: int) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the block ends, then stop it as Ctrl-C does."""
    with subprocess.Popen(
        argv, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
        assert process.returncode == ends_with


def until_it_trains(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    for line in process.stdout:
        if STEPS.search(line):
            return
    pytest.fail("the run ended before its first step")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder with the README's environment and model."""
    folder = tmp_path_factory.mktemp("readme")
    [code] = snippets("python")
    name = code.splitlines()[0].removeprefix("# ")
    (folder / name).write_text(code)
    [make_model] = commands("agent", "rollmesh make-model")
    run(make_model, folder)
    assert why_no_model(str(folder / make_model[-1])) == ""
    return folder


def test_every_snippet_is_run_by_a_test() -> None:
    assert {name for name, _ in BLOCKS} == {"text", "sh", "python", "toml"}
    assert len(snippets("python")) == len(snippets("toml")) == 1
    shown = snippets("sh")
    assert [sum(phrase in text for phrase in SHELL.values()) for text in shown] == [1] * len(shown)
    assert len(shown) == len(SHELL)


def test_the_readmes_agent_trains_is_inspected_and_resumes(project: Path) -> None:
    [play], [init] = commands("agent", "rollmesh play"), commands("agent", "rollmesh init")
    assert "=== completed, reward " in run(play, project)
    assert "before `rollmesh up" not in run(init, project)
    [up, resume] = commands("agent", "rollmesh up")
    [status], [drain] = commands("agent", "rollmesh status"), commands("agent", "rollmesh drain")
    with running(up, project, ends_with=130) as process:
        until_it_trains(process)
        assert run(status, project).startswith("mesh: running, step ")
        drained = run(drain, project)
        assert drained.startswith(f"{drain[-1]} takes no new rollouts")
        assert "router: tcp://127.0.0.1:" in drained
        assert "status http://127.0.0.1:" in drained
    summary = orjson.loads((project / "runs/mesh/summary.json").read_bytes())
    assert summary["num_steps"] >= 1
    with running(resume, project, ends_with=130) as process:
        until_it_trains(process)


def test_the_extra_of_the_install_command_exists() -> None:
    [install] = commands("agent", "pip install")
    extra = install[-1].partition("[")[2].rstrip("]")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert extra in project["optional-dependencies"]


def test_the_readmes_settings_are_valid(tmp_path: Path) -> None:
    [text] = snippets("toml")
    (tmp_path / "mesh.toml").write_text(text)
    assert load_config(tmp_path / "mesh.toml").env == "my_env:MyEnv"


def test_the_model_is_evaluated(project: Path) -> None:
    [argv] = commands("eval", "rollmesh eval")
    assert run(argv, project).startswith("guess: 400 rollouts of 7 tasks")
    assert len((project / "runs/eval/results.jsonl").read_bytes().splitlines()) == 400


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_gateway_serves_the_curl_commands(project: Path) -> None:
    with listen("127.0.0.1:0") as first, listen("127.0.0.1:0") as second:
        ports = [str(each.getsockname()[1]) for each in (first, second)]
    [engine, gateway] = [
        shlex.split(" ".join(argv).removesuffix(" &").replace("30000", ports[0]))
        for argv in commands("serve")
    ]
    page = (ROOT / "docs/howto/gateway.md").read_text()
    [here] = re.findall(r"^```sh\n(gateway=.*?)^```$", page, re.DOTALL | re.MULTILINE)
    here = here.replace("8100", ports[1])
    with (
        running(engine, project, ends_with=0),
        running([*gateway, "--port", ports[1]], project, ends_with=0) as process,
    ):
        assert process.stdout
        assert process.stdout.readline().startswith("rollmesh gateway: http://127.0.0.1:")
        output = run(["bash", "-euc", here], project).replace("}{", "}\n{")
    chat, message, rewarded, finished, deleted = map(orjson.loads, output.splitlines())
    assert (chat["object"], message["type"]) == ("chat.completion", "message")
    assert (rewarded["metadata"], rewarded["reward"]) == ({"task": 7}, 1.0)
    assert finished["session_id"] == deleted["session_id"]
    assert [sample["reward"] for sample in finished["samples"]] == [1.0, 1.0]
    assert set(finished["samples"][0]) >= {"token_ids", "logprobs", "loss_mask", "policy_versions"}


def test_the_make_targets_exist() -> None:
    for argv in commands("make"):
        assert run([*argv, "--dry-run"], ROOT)


def test_the_compose_commands_name_files_and_services_that_exist() -> None:
    page = (ROOT / "docs/howto/containers.md").read_text()
    [shown] = re.findall(r"^```sh\n(docker compose .*?)^```$", page, re.DOTALL | re.MULTILINE)[:1]
    for argv in map(shlex.split, shown.splitlines()):
        file = ROOT / argv[argv.index("-f") + 1]
        services = YAML(typ="safe").load(file.read_text())["services"]
        named = [each.partition("=")[0] for each in argv if "=" in each]
        assert {*named, *(argv[-1:] if argv[-1].isalpha() else [])} - {"down"} <= services.keys()
