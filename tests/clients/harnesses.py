"""Command-line agents: the configuration and the command that connect each to a session.

Each gets a scratch folder as its home, so that no file of the user is read or changed, and an
environment that forbids network access beyond this machine.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from tests.clients.drivers.toolbox import (
    MAX_TURNS,
    PARAMETERS,
    QUESTION,
    SYSTEM,
    TOOL_NAME,
    TOOL_TEXT,
)
from tests.house.leaks import MARK_VARIABLE

REPO = Path(__file__).resolve().parents[2]
VENVS = REPO / ".venv-clients"


class Visit(NamedTuple):
    """One task of one client."""

    home: Path
    """Empty; removed afterwards."""
    work: Path
    """Folder of the task's files."""
    base_url: str
    """Ends in /v1."""
    api_key: str
    dialect: str
    is_stream: bool

    @property
    def root_url(self) -> str:
        """For clients that append /v1 themselves."""
        return self.base_url.removesuffix("/v1")


class Command(NamedTuple):
    """The command of a client."""

    argv: list[str]
    env: dict[str, str]


def environment(visit: Visit, **more: str) -> dict[str, str]:
    """Environment of every client: a path, a home, and the mark by which leftovers are found;
    nothing else of this process.
    """
    home = str(visit.home)
    ours = {name: os.environ[name] for name in ("PATH", MARK_VARIABLE)}
    return {**ours, "HOME": home, "XDG_CONFIG_HOME": home, "TERM": "dumb", **more}


def driver(visit: Visit, home: str, name: str) -> Command:
    """Run a script of drivers/ in the client's own interpreter; `home` '' is this one."""
    python = str(VENVS / home / "bin" / "python") if home else sys.executable
    script = str(Path(__file__).with_name("drivers") / f"{name}.py")
    mode = "stream" if visit.is_stream else "plain"
    argv = [python, script, visit.base_url, visit.api_key, visit.dialect, mode]
    return Command(argv, environment(visit, PYTHONPATH=str(REPO), PYTHONDONTWRITEBYTECODE="1"))


def ai_sdk(visit: Visit) -> Command:
    """Vercel's AI SDK, by a script of drivers/ that reports as the others do."""
    task = {
        "system": SYSTEM,
        "question": QUESTION,
        "tool": TOOL_NAME,
        "text": TOOL_TEXT,
        "parameters": PARAMETERS,
        "turns": MAX_TURNS,
    }
    script = str(Path(__file__).with_name("drivers") / "ai_sdk.cjs")
    mode = "stream" if visit.is_stream else "plain"
    argv = ["node", script, visit.base_url, visit.api_key, visit.dialect, mode]
    packages = str(VENVS / "ai-sdk")
    return Command(argv, environment(visit, TASK=json.dumps(task), PACKAGES=packages))


def pi(visit: Visit) -> Command:
    """One binary, three dialects, all streamed."""
    api = {
        "chat": "openai-completions",
        "responses": "openai-responses",
        "messages": "anthropic-messages",
    }[visit.dialect]
    provider = {
        "api": api,
        "apiKey": visit.api_key,
        "baseUrl": visit.root_url if visit.dialect == "messages" else visit.base_url,
        "models": [{"id": "policy", "reasoning": True}],
    }
    _write(visit.home / ".pi/agent/models.json", {"providers": {"gateway": provider}})
    argv = [
        str(VENVS / "pi/node_modules/.bin/pi"),
        *("--provider", "gateway", "--model", "policy", "--no-session", "-p", QUESTION),
    ]
    return Command(argv, environment(visit, PI_OFFLINE="1"))


def codex(visit: Visit, idle_ms: int = 60_000) -> Command:
    """Responses only, streamed; after `idle_ms` without an event it resends, up to five times."""
    config = (
        'model = "policy"\nmodel_provider = "gateway"\n[model_providers.gateway]\n'
        f'name = "gateway"\nbase_url = "{visit.base_url}"\nenv_key = "GATEWAY_KEY"\n'
        f'wire_api = "responses"\nstream_idle_timeout_ms = {idle_ms}\n'
    )
    folder = visit.home / ".codex"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    argv = [
        str(VENVS / "codex/node_modules/.bin/codex"),
        *("exec", "--skip-git-repo-check", "-s", "danger-full-access", QUESTION),
    ]
    return Command(argv, environment(visit, GATEWAY_KEY=visit.api_key))


def opencode(visit: Visit) -> Command:
    """Three dialects by three SDKs, all streamed; it also requests a title."""
    sdk = {
        "chat": "@ai-sdk/openai-compatible",
        "responses": "@ai-sdk/openai",
        "messages": "@ai-sdk/anthropic",
    }[visit.dialect]
    provider = {
        "npm": sdk,
        "options": {"baseURL": visit.base_url, "apiKey": visit.api_key},
        "models": {"policy": {"tool_call": True, "reasoning": True}},
    }
    config = {"provider": {"gateway": provider}, "model": "gateway/policy", "autoupdate": False}
    _write(visit.home / "opencode/opencode.json", config)
    argv = [
        str(VENVS / "opencode/node_modules/opencode-linux-x64/bin/opencode"),
        *("run", "--model", "gateway/policy", QUESTION),
    ]
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return Command(argv, environment(visit, **quiet))


def mini(visit: Visit) -> Command:
    """mini-swe-agent over litellm: plain chat completions."""
    model = {
        "model_name": "openai/policy",
        "cost_tracking": "ignore_errors",
        "model_kwargs": {"api_base": visit.base_url, "api_key": visit.api_key},
    }
    config = visit.home / "gateway.yaml"
    _write(config, {"model": model})  # JSON is YAML
    argv = [
        str(VENVS / "mini/bin/mini"),
        *("-c", "mini.yaml", "-c", str(config), "-t", QUESTION, "-y", "--exit-immediately"),
    ]
    quiet = {"MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return Command(argv, environment(visit, **quiet))


def _write(path: Path, tree: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))
