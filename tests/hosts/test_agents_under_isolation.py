"""The whole product over two hosts: unmodified agents under isolation train to the last step
although one host is cut off and processes of each kind are killed.

The agents are a program with the stock OpenAI client, and mini-swe-agent (`make test-clients`).
"""

import json
import secrets
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from rollmesh.core.files import read_rows
from rollmesh.testing.host_mesh import HostMesh
from rollmesh.testing.network import HostNetwork
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from tests.flow.test_run import kept
from tests.flow.trained_mesh import model as model  # the fixture
from tests.hosts.accounts import check_whole, settings_of
from tests.security.agent_env import MINI, QUESTION, SYSTEM
from tests.security.test_isolation import mode as mode  # the fixture
from tests.security.test_isolation import processes_named
from tests.security.test_kills_under_isolation import check_exact

HOSTS = {
    "router": "head",
    "trainer": "head",
    "engine-0": "head",
    "worker-0": "head",
    "engine-1": "other",
    "worker-1": "other",
}
CUT_S = 12.0
"""Longer than a silent connection is kept."""
WITHIN_S = 240.0
ENDS_WITHIN_S = 60.0
NUM_MORE = 2
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The bash command to execute"}
            },
            "required": ["command"],
        },
    },
}
"""The tool of mini-swe-agent."""
OUTPUT = "<returncode>0</returncode>\n<output>\n</output>"
"""The message of mini-swe-agent after a command that prints nothing."""
RESULT = f"\n<|im_start|>user\n<tool_response>\n{OUTPUT}\n</tool_response><|im_end|>\n"
WRITE = [f"echo {number} > answer.txt" for number in range(1, 8)]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
NUM_LESSONS = 40


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that calls the tool of mini-swe-agent: to write a number, then to submit."""
    folder = tmp_path_factory.mktemp("calling") / "model"
    texts = [SYSTEM, QUESTION, json.dumps(BASH), RESULT, *map(call, (*WRITE, SUBMIT))]
    learner: Any = write_tiny_model(folder, texts, TinyShape(), seed=0)
    ids_BT, labels_BT = lessons(folder)
    torch.set_num_threads(1)  # on a busy machine, threads wait minutes for each other
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.01)
    for _ in range(NUM_LESSONS):
        optimizer.zero_grad()
        learner(input_ids=ids_BT, labels=labels_BT).loss.backward()
        optimizer.step()
    learner.save_pretrained(folder)
    return folder


def lessons(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a conversation for each number, and its labels: only the model's turns count."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        chat, tools=[BASH], add_generation_prompt=True, tokenize=False
    )
    ids_BT, labels_BT = [], []
    for write in WRITE:
        ids: list[int] = []
        labels: list[int] = []
        for given, sampled in (
            (prompt, call(write)),
            (f"{RESULT}<|im_start|>assistant\n", call(SUBMIT)),
        ):
            given_ids, sampled_ids = tokenizer.encode(given), tokenizer.encode(sampled)
            ids += given_ids + sampled_ids
            labels += [-100] * len(given_ids) + sampled_ids
        ids_BT.append(ids)
        labels_BT.append(labels)
    return torch.tensor(ids_BT), torch.tensor(labels_BT)


def call(command: str) -> str:
    """The text of a turn that calls the tool."""
    arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{arguments}\n</tool_call><|im_end|>"


@pytest.fixture(params=["openai", pytest.param("mini", marks=pytest.mark.clients)])
def agents(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of the mesh for one kind of agent, and `mark`, an argument of each agent."""
    mark = f"agent-{secrets.token_hex(8)}"
    if request.param == "mini":
        assert MINI.exists(), "`make clients` installs it"
        settings = settings_of(
            request.getfixturevalue("calling_model"),
            env="tests.security.agent_env:MiniAgent",
            env_settings={"mark": mark},
            sampling={"max_tokens": 64},
        )
        settings["model"]["max_context_tokens"] = 1024
        # An agent's start takes seconds of a core. The model must not forget how to call.
        settings["trainer"] |= {"groups_per_step": 1, "learning_rate": 1e-4}
        return settings
    return settings_of(
        request.getfixturevalue("model"),
        env="tests.security.agent_env:Agent",
        env_settings={"kind": request.param, "mark": mark},
        sampling={"max_tokens": 8},
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["bwrap"], indirect=True)
def test_agents_on_two_hosts_train_to_the_last_step_through_a_cut_and_kills(
    tmp_path: Path, agents: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, mark = tmp_path / "scratch", agents["env_settings"]["mark"]
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    settings = {**agents, "worker": {"max_rollouts": 4, "isolation": mode}}
    settings["trainer"] |= {"samples_per_group": 2, "max_running_groups": 3, "checkpoint_steps": 2}
    with HostNetwork(dict.fromkeys(HOSTS.values())) as network:
        mesh = HostMesh(tmp_path, network, HOSTS, settings)
        with closing(mesh), kept(mesh.run / "weights", mesh.run / "all_weights"):
            mesh.start(*HOSTS)
            mesh.until_steps(2, WITHIN_S)
            network.disconnect("other")
            threading.Event().wait(CUT_S)
            network.heal()
            mesh.until_full_speed(WITHIN_S)
            for role in ("worker-1", "engine-0"):
                mesh.kill(role)
                mesh.start(role)
                mesh.until_full_speed(WITHIN_S)
            num_steps = mesh.finish(NUM_MORE, WITHIN_S)
            pids = [pid for host in network.hosts.values() for pid in host.pids()]
            processes = [each for each in psutil.process_iter() if each.pid in pids]
        check_whole(mesh.run, num_steps)
        trajectories = read_rows(mesh.run / "trajectories.jsonl")
        assert {each["outcome"] for each in trajectories} == {"completed"}
        has_answer = [each["metrics"]["has_answer"] for each in trajectories]
        assert sum(has_answer) > 0.5 * len(has_answer)
        check_exact(mesh.run, mesh.run / "all_weights")
        # A worker's orphan reaper ends after the worker, when nothing of it is left.
        assert psutil.wait_procs(processes, ENDS_WITHIN_S)[1] == []
        assert processes_named(mark) == []
        assert list(scratch.glob("rollmesh-*")) == []
