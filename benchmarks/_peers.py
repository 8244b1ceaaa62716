"""Other capture gateways as servers beside ours, where `make bench-peers` has installed them.

    rllm        rllm-model-gateway, its memory store, the faster of its two
    verifiers   verifiers' interception server
    litellm     litellm's proxy, which captures nothing; one worker

Each stands in a venv of its own below .venv-peers/ and forwards to the canned engine's chat
endpoint, as its own documentation starts it. Invariant: a peer that is not installed is not there;
one that is and does not start is an error, not a gap in the table. Driven by _rounds.py.
"""

import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks._arms import NUM_CONNECTIONS, Arm, Child, Door, cores

VENVS = Path(__file__).parents[1] / ".venv-peers"


class KeyedArm(Arm):
    """A server whose sessions were opened at its start, one key each."""

    def __init__(self, name: str, child: Child, keys: Sequence[str]) -> None:
        super().__init__(name, child)
        self._keys = keys

    async def open(self, num_sessions: int) -> list[Door]:
        return [Door(self._path, key.encode()) for key in self._keys[:num_sessions]]


class PathArm(Arm):
    """A server whose sessions are made by naming them in the path."""

    async def open(self, num_sessions: int) -> list[Door]:
        sessions = [b"/sessions/s%d" % number for number in range(num_sessions)]
        return [Door(session + self._path, b"none") for session in sessions]


def start_peers(engine: Child, folder: Path) -> Iterator[Arm]:
    """Those that are installed; files of theirs go to `folder`."""
    address = engine.ready.address
    if program := _program("rllm", "rllm-model-gateway"):
        argv = [program, "--worker", f"{address}/v1", "--store", "memory", "--log-level", "error"]
        port = _free_port()
        yield PathArm("rllm", Child([*argv, "--port", str(port)], cores()[0], port))
    if program := _program("verifiers", "python"):
        keys = folder / "verifiers.keys"
        script = str(Path(__file__).with_name("_verifiers_peer.py"))
        argv = [program, script, "--engine", address, "--keys", str(keys)]
        yield KeyedArm("verifiers", Child(argv, cores()[0]), keys.read_text().split())
    if program := _program("litellm", "litellm"):
        argv = [program, "--model", "openai/policy", "--api_base", f"{address}/v1"]
        port = _free_port()
        key = f"sk-{secrets.token_hex(16)}"
        env = {"LITELLM_MASTER_KEY": key, "OPENAI_API_KEY": "none", "LITELLM_LOG": "ERROR"}
        env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks the network as it starts
        argv += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        child = Child(argv, cores()[0], port, env)
        yield KeyedArm("litellm", child, [key] * NUM_CONNECTIONS)


def _program(venv: str, name: str) -> str:
    """Where a program of a peer's venv is; '' if it is not installed."""
    path = VENVS / venv / "bin" / name
    return str(path) if path.is_file() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
