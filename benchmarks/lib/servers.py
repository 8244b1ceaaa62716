"""The servers that the interception benchmark compares, each a process on one core.

    direct           no server: the load calls the canned engine
    bare             benchmarks/lib/proxy.py
    tokens, relay    `rollmesh gateway --capture ...`
    rllm             rllm-model-gateway with its memory store, the faster of its two
    verifiers        verifiers' interception server
    litellm          litellm's proxy, which captures nothing; one worker

Peers are installed by `make bench-peers`, each in its own venv below .venv-peers/, and started as
their documentation recommends. A peer that is not installed is left out; one that does not start is
an error.

- Servers share the first core and never run at the same time; engine and load share the second.
- A server's CPU is that of its process and its children.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.lib.http_load import HttpAnswer, Talk, carry
from rollmesh.core.process import Ready, die_with_parent

NUM_CONNECTIONS = 32
MB = 1e6
START_TIMEOUT_S = 120.0


class SessionEndpoint(NamedTuple):
    """Address and credentials for the calls of one session."""

    path: bytes
    key: bytes
    session_id: str = ""


class _Opened(msgspec.Struct):
    """The answer of POST /admin/sessions."""

    session_id: str
    api_key: str


_USABLE = sorted(os.sched_getaffinity(0))


def cores() -> tuple[set[int], set[int]]:
    """Return the core of the servers and that of load and engine; the same if there is only one."""
    return {_USABLE[0]}, {_USABLE[min(1, len(_USABLE) - 1)]}


def pin_load() -> None:
    """Pin this process, the load, to its core."""
    os.sched_setaffinity(0, cores()[1])


class ServerProcess:
    """A server process, pinned to `core`."""

    def __init__(
        self, argv: Sequence[str], core: set[int], port: int = 0, env: dict[str, str] | None = None
    ) -> None:
        """Wait until it serves: until it reports on --ready-fd, or listens at `port`."""
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            argv if port else [*argv, "--ready-fd", str(writing)],
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | (env or {}),
            preexec_fn=partial(_begin, core),
        )
        os.close(writing)
        self._usage = psutil.Process(self._process.pid)
        self.port = port
        with os.fdopen(reading, "rb") as pipe:
            if port:
                self._wait_for(port)
            else:
                self._read_ready(pipe.readline())

    def _read_ready(self, line: bytes) -> None:
        if not line:
            raise RuntimeError(f"a server ended with code {self._process.wait()} as it began")
        self.ready = msgspec.json.decode(line, type=Ready)
        self.port = int(self.ready.address.rpartition(":")[2] or 0)

    def _wait_for(self, port: int) -> None:
        late_s = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < late_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        self.end()
        raise RuntimeError(f"{self._process.args!r} does not serve")

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children, to the nanosecond; psutil counts in ticks
        only.
        """
        pids = [p.pid for p in (self._usage, *self._usage.children(recursive=True))]
        threads = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(file.read_text().split()[0]) for file in threads) / 1e9

    def rss_mb(self) -> float:
        """Resident MB of the process itself."""
        return float(self._usage.memory_info().rss) / MB

    def end(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait()


def _begin(core: set[int]) -> None:
    """Prepare the child before it runs its program."""
    os.sched_setaffinity(0, core)
    die_with_parent()


class ChatServer:
    """A server that takes chat completions, without sessions."""

    def __init__(
        self, name: str, child: ServerProcess, path: bytes = b"/v1/chat/completions"
    ) -> None:
        self.name = name
        self.child = child
        self._path = path

    @property
    def port(self) -> int:
        return self.child.port

    async def open(self, num_sessions: int) -> list[SessionEndpoint]:
        """Open sessions; this server has one for all."""
        return [SessionEndpoint(self._path, b"none")] * num_sessions

    async def close(self, endpoints: Sequence[SessionEndpoint]) -> None:
        """Forget the sessions."""
        del endpoints


class GatewayArm(ChatServer):
    """Our gateway; sessions are opened and closed by its admin routes."""

    def __init__(self, name: str, child: ServerProcess, admin_token: str) -> None:
        super().__init__(name, child)
        self._admin_port = int((child.ready.http_address or child.ready.address).rpartition(":")[2])
        self._head = b"Host: bench\r\nAuthorization: Bearer %b\r\n" % admin_token.encode()

    async def open(self, num_sessions: int) -> list[SessionEndpoint]:
        opened: list[_Opened] = []
        request = self._request(b"POST", b"", b'{"metadata":{}}')

        def talk() -> Talk:
            reply: HttpAnswer = yield request
            opened.append(msgspec.json.decode(reply.body, type=_Opened))

        await self._carry(talk() for _ in range(num_sessions))
        return [
            SessionEndpoint(self._path, each.api_key.encode(), each.session_id) for each in opened
        ]

    async def close(self, endpoints: Sequence[SessionEndpoint]) -> None:
        def talk(endpoint: SessionEndpoint) -> Talk:
            yield self._request(b"DELETE", b"/" + endpoint.session_id.encode(), b"")

        await self._carry(talk(endpoint) for endpoint in endpoints)

    def _request(self, method: bytes, below: bytes, body: bytes) -> bytes:
        line = b"%b /admin/sessions%b HTTP/1.1\r\n" % (method, below)
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return line + self._head + b"Content-Type: application/json\r\n" + length + body

    async def _carry(self, talks: Iterable[Talk]) -> None:
        await carry(self._admin_port, talks, NUM_CONNECTIONS)


def start_engine(folder: Path) -> ServerProcess:
    """Start the canned engine."""
    argv = [sys.executable, "-m", "benchmarks.lib.canned_engine", "--folder", str(folder)]
    return ServerProcess(argv, cores()[1])


def start_bare(engine: ServerProcess) -> ChatServer:
    """Start the baseline proxy."""
    argv = [sys.executable, "-m", "benchmarks.lib.proxy", "--engine", engine.ready.address]
    return ChatServer("bare", ServerProcess(argv, cores()[0]))


def start_gateway(
    capture: str, engine: ServerProcess, model: Path, folder: Path, journal: Path | None = None
) -> ChatServer:
    """Start our gateway in one of its two modes; its admin token is kept in `folder`.

    Without a journal it is the interception server that workers have.
    """
    token_file = folder / f"{capture}.token"
    token_file.touch(0o600)
    token_file.write_text(token := secrets.token_urlsafe(32))
    argv = [sys.executable, "-m", "rollmesh.cli.main", "gateway", "--engine", engine.ready.address]
    argv += ["--capture", capture, "--host", "127.0.0.1", "--port", "0"]
    argv += ["--model-dir", str(model)] if capture == "tokens" else []
    argv += ["--journal", str(journal)] if journal else ["--no-journal"]
    child = ServerProcess([*argv, "--admin-token-file", str(token_file)], cores()[0])
    return GatewayArm(f"{capture}_kept" if journal else capture, child, token)


VENVS = Path(__file__).parents[2] / ".venv-peers"


class KeyedArm(ChatServer):
    """A server whose sessions were opened at its start, each with its key."""

    def __init__(self, name: str, child: ServerProcess, keys: Sequence[str]) -> None:
        super().__init__(name, child)
        self._keys = keys

    async def open(self, num_sessions: int) -> list[SessionEndpoint]:
        return [SessionEndpoint(self._path, key.encode()) for key in self._keys[:num_sessions]]


class PathArm(ChatServer):
    """A server whose sessions are created by naming them in the path."""

    async def open(self, num_sessions: int) -> list[SessionEndpoint]:
        sessions = [b"/sessions/s%d" % number for number in range(num_sessions)]
        return [SessionEndpoint(session + self._path, b"none") for session in sessions]


def start_peers(engine: ServerProcess, folder: Path) -> Iterator[ChatServer]:
    """Start the installed peers; their files go to `folder`."""
    address = engine.ready.address
    if program := _program("rllm", "rllm-model-gateway"):
        argv = [program, "--worker", f"{address}/v1", "--store", "memory", "--log-level", "error"]
        port = _free_port()
        yield PathArm("rllm", ServerProcess([*argv, "--port", str(port)], cores()[0], port))
    if program := _program("verifiers", "python"):
        keys = folder / "verifiers.keys"
        script = str(Path(__file__).with_name("verifiers_interception.py"))
        argv = [program, script, "--engine", address, "--keys", str(keys)]
        yield KeyedArm("verifiers", ServerProcess(argv, cores()[0]), keys.read_text().split())
    if program := _program("litellm", "litellm"):
        argv = [program, "--model", "openai/policy", "--api_base", f"{address}/v1"]
        port = _free_port()
        key = f"sk-{secrets.token_hex(16)}"
        env = {"LITELLM_MASTER_KEY": key, "OPENAI_API_KEY": "none", "LITELLM_LOG": "ERROR"}
        env |= {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True"
        }  # otherwise it makes requests to the network at its start
        argv += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        child = ServerProcess(argv, cores()[0], port, env)
        yield KeyedArm("litellm", child, [key] * NUM_CONNECTIONS)


def _program(venv: str, name: str) -> str:
    """Return the path of a program in a peer's venv; '' if it is not installed."""
    path = VENVS / venv / "bin" / name
    return str(path) if path.is_file() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
