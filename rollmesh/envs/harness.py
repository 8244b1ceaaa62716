"""An environment whose agent is a command-line program: any harness, unchanged.

    scratch folder --prepare--> files of the task --program runs--> collect --> Transcript --> score

- The program finds its model in the variables that SDKs and agents read, and in placeholders of its
  arguments, variables and configuration files. It inherits only the variables in `keep_env`.
- `worker.isolation` decides what else it can reach (isolation.py). With "none" it runs as the
  worker's user, and can read what that user can: other rollouts' folders, key files, the run.
- When `run` returns, its slot is empty, its folders are removed, and the session's key is removed
  from its output.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from rollmesh.core.errors import AgentFailed, EnvError
from rollmesh.core.logs import get_logger
from rollmesh.core.types import Json, Task
from rollmesh.envs.calls import call_hook
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.envs.isolation import Network
from rollmesh.envs.program import Command, ProgramExit, run_program
from rollmesh.envs.scratch import ScratchFolders, new_scratch

log = get_logger()

PLACEHOLDER = re.compile(r"\{(task_id|question|base_url|root_url|api_key|model|home|work)\}")
LOGGED_CHARS = 2000
"""Logged characters of the output of a failed program."""
KEPT = ("PATH", "LANG", "LC_ALL", "TZ")


class HarnessEnv(Env):
    """Runs `argv` once per rollout; subclasses add `tasks` and `score`.

    `argv`, the values of `env` and the texts of `files` may hold {question}, {model}, {base_url}
    (ends in /v1), {root_url} (does not), {api_key}, {home}, {work} and {task_id}. Arguments are
    visible to all users of the machine: pass the key by a variable or a file.
    """

    def __init__(
        self,
        *,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        keep_env: Sequence[str] = KEPT,
        timeout_s: float = 900.0,
        max_output_bytes: int = 64 * 1024,
        exit_codes: Sequence[int] = (0,),
        network: Network = "session",
        read_only: Sequence[str] = (),
    ) -> None:
        """`files` are written to the home folder; exit codes other than `exit_codes` are the
        agent's fault.

        Under bwrap the program has no network but its session's endpoint, or the host's with
        `network = "host"`, and of the host it sees system folders, its own installation and the
        paths of `read_only`.
        """
        if not argv:
            raise EnvError("argv is empty; name the program of the agent")
        for text in (*argv, *(env or {}).values(), *(files or {}).values()):
            if not isinstance(text, str):
                raise EnvError(f"argv, env and files hold texts; {text!r} is none")
        if timeout_s <= 0 or max_output_bytes <= 0:
            raise EnvError("timeout_s and max_output_bytes must be positive")
        if network not in ("session", "host"):
            raise EnvError(f'network = "{network}"; it is "session" or "host"')
        self._network: Network = network
        self._read_only = tuple(Path(path) for path in read_only)
        self._argv = tuple(argv)
        self._env = dict(env or {})
        self._files = dict(files or {})
        self._keep_env = tuple(keep_env)
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes
        self._exit_codes = frozenset(exit_codes)

    def question(self, task: Task) -> str:
        """Return the value of {question}. Default: the task's `question`."""
        return str(task.data.get("question", ""))

    def prepare(self, task: Task, work: Path) -> Awaitable[None] | None:
        """Write the task into the working directory. Default: the task's `files`, path to text."""
        _write_files(work, task.data.get("files", {}))
        return None

    def collect(self, task: Task, work: Path) -> dict[str, Json] | Awaitable[dict[str, Json]]:
        """Return data for `score` from the working directory before it is removed. Default:
        nothing."""
        del task, work
        return {}

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        """Run the program once; AgentFailed after an exit code that is not allowed."""
        agent = agent.on_this_machine()
        async with new_scratch() as scratch:
            placeholders = self._placeholders(task, agent, scratch)
            files = {path: _filled(text, placeholders) for path, text in self._files.items()}
            await asyncio.to_thread(_write_files, scratch.home, files)
            await call_hook(self.prepare, task, scratch.work)
            command = self._command(placeholders, agent, scratch)
            ended = await run_program(command, self._timeout_s, self._max_output_bytes)
            output = ended.output.replace(agent.api_key, "[key]")
            self._check(ended, output)
            collected: dict[str, Json] = await call_hook(self.collect, task, scratch.work)
        data = {"exit_code": ended.exit_code, "output": output, **collected}
        return Transcript(data=data, truncated=ended.is_overtime)

    def _placeholders(self, task: Task, agent: Endpoint, scratch: ScratchFolders) -> dict[str, str]:
        return {
            "task_id": task.id,
            "question": self.question(task),
            "base_url": agent.base_url,
            "root_url": agent.root_url,
            "api_key": agent.api_key,
            "model": agent.model,
            "home": str(scratch.home),
            "work": str(scratch.work),
        }

    def _command(
        self, placeholders: Mapping[str, str], agent: Endpoint, scratch: ScratchFolders
    ) -> Command:
        inherited = {name: os.environ[name] for name in self._keep_env if name in os.environ}
        own = {name: _filled(text, placeholders) for name, text in self._env.items()}
        return Command(
            argv=tuple(_filled(word, placeholders) for word in self._argv),
            folder=scratch.work,
            env={**inherited, **_home_variables(scratch.home), **_model_variables(agent), **own},
            writable=(scratch.home,),
            read_only=self._read_only,
            base_url=agent.base_url,
            network=self._network,
        )

    def _check(self, ended: ProgramExit, output: str) -> None:
        """Log a failed end; AgentFailed, unless its time was over: that is scored."""
        code = ended.exit_code
        if code in self._exit_codes and not ended.is_overtime:
            return
        program = os.path.basename(self._argv[0])
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        log.warning(
            "program.failed",
            program=program,
            how="overtime" if ended.is_overtime else how,
            output=output[-LOGGED_CHARS:],
        )
        if not ended.is_overtime:
            last_line = next((x for x in reversed(output.splitlines()) if x.strip()), "")
            raise AgentFailed(f"{program} ended with {how}: {last_line}")


def _model_variables(agent: Endpoint) -> dict[str, str]:
    """Return the variables by which SDKs and agents find their model."""
    return {
        "OPENAI_BASE_URL": agent.base_url,
        "OPENAI_API_BASE": agent.base_url,
        "OPENAI_API_KEY": agent.api_key,
        "OPENAI_MODEL": agent.model,
        "ANTHROPIC_BASE_URL": agent.root_url,
        "ANTHROPIC_API_KEY": agent.api_key,
        "ANTHROPIC_MODEL": agent.model,
    }


def _home_variables(home: Path) -> dict[str, str]:
    """Return variables for a home, temporary files and sockets of its own; no terminal."""
    return {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_DATA_HOME": str(home / ".local/share"),
        "TMPDIR": str(home),
        "TMUX_TMPDIR": str(home),
        "TERM": "dumb",
    }


def _filled(text: str, placeholders: Mapping[str, str]) -> str:
    """Replace placeholders once; inserted text is not searched again."""
    return PLACEHOLDER.sub(lambda found: placeholders[found[1]], text)


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by their paths below the folder; EnvError for a path that leads out of it."""
    for name, text in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise EnvError(f"the file {name} is not below its folder; give a relative path")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
