"""Fix a bug: a command-line agent gets a folder with a broken function; hidden checks score it.

    files -> the agent works in the folder -> the file is taken out -> checks run on it elsewhere

- The checks are never in the folder of the agent.
- The reward is 1 only if the checks ran to their end and all passed.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.bugs.bugs import all_bugs
from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json, Score, Task
from rollmesh.envs import read_text
from rollmesh.envs.env import Transcript
from rollmesh.envs.harness import HarnessEnv
from rollmesh.envs.program import Command, run_program
from rollmesh.envs.scratch import new_scratch
from rollmesh.envs.tasks import rounds

QUESTION = """The function in {name}.py does not do what its docstring says: it has one \
bug. Find it and fix it in place; its name and its parameters stay as they are."""

# mini-swe-agent's model, through litellm; JSON is YAML.
MINI_CONFIG = """{"model": {"model_name": "openai/{model}", "cost_tracking": "ignore_errors", \
"model_kwargs": {"api_base": "{base_url}", "api_key": "{api_key}"}}}"""
MINI_ARGV = (
    *("mini", "-c", "mini.yaml", "-c", "{home}/gateway.yaml", "-t", "{question}"),
    *("-y", "--exit-immediately"),
)
MINI_ENV = {"MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

SMALL_ARGV = (sys.executable, str(Path(__file__).with_name("agent.py")), "{question}")

# The agent's code is imported and may call sys.exit(0), so a secret printed at the end proves that
# the checks passed. Code that searches for the secret finds it; only a sandbox prevents that.
CHECKER = """import sys
secret = sys.argv.pop()
sys.path.insert(0, {folder!r})
from {name} import {name}
{checks}
print(secret)
"""
CHECK_S = 10.0
MAX_SOURCE_BYTES = 64 * 1024


class BugsEnv(HarnessEnv):
    """`agent` is `mini` (mini-swe-agent, at the path `mini`) or `small` (agent.py in this
    folder).
    """

    def __init__(
        self, *, agent: str = "mini", mini: str = "mini", timeout_s: float = 300.0
    ) -> None:
        if agent not in ("mini", "small"):
            raise EnvError(f'agent = "{agent}"; it is "mini" or "small"')
        is_mini = agent == "mini"
        super().__init__(
            argv=(mini, *MINI_ARGV[1:]) if is_mini else SMALL_ARGV,
            files={"gateway.yaml": MINI_CONFIG} if is_mini else {},
            env=MINI_ENV if is_mini else {},
            timeout_s=timeout_s,
        )
        self._bugs = {bug.id: bug for bug in all_bugs()}

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Return one task per bug."""
        tasks = []
        for bug in self._bugs.values():
            name = bug.function.name
            data = {"question": QUESTION.format(name=name), "files": {f"{name}.py": bug.source}}
            tasks.append(Task(id=bug.id, data=data))
        return rounds(tasks, split, seed)

    def collect(self, task: Task, work: Path) -> dict[str, Json]:
        """Return the file as the agent left it."""
        name = f"{self._bugs[task.id].function.name}.py"
        try:
            source = read_text(work, name, MAX_SOURCE_BYTES)
        except OSError:  # missing, a link, or too long
            source = ""
        return {"source": source}

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Return 1 if all checks pass."""
        function = self._bugs[task.id].function
        secret = secrets.token_hex(8)
        async with new_scratch() as scratch:
            checker = CHECKER.format(
                folder=str(scratch.work), name=function.name, checks=function.checks
            )
            await asyncio.to_thread(
                (scratch.work / f"{function.name}.py").write_text, transcript.data["source"]
            )
            command = Command(
                argv=(sys.executable, "-I", "-c", checker, secret),
                folder=scratch.work,
                env={"PATH": os.environ.get("PATH", "")},
            )
            ended = await run_program(command, CHECK_S, 4096)
        holds = ended.exit_code == 0 and ended.output.split()[-1:] == [secret]
        return Score(float(holds), {"exit_code": float(transcript.data["exit_code"])})
