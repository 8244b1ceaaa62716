"""Isolation of agents' programs from the worker, from each other and from the host.

    auto:  bwrap --probe fails--> uid --probe fails--> none

- bwrap: namespaces for users, processes, mounts, IPC and network (bubblewrap). uid: a user id of
  its own; network and world-readable files are the host's. none: the worker's user.
- A mode is probed by running the program's interpreter in a slot, once per program and network.
- A mode that the settings name is never replaced by a weaker one: its failure is an InfraError.
- When a slot ends, all of its processes have ended, and its control group is gone.
"""

import asyncio
import contextlib
import functools
import os
import platform
import re
import select
import shutil
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from rollmesh.core.addresses import is_loopback
from rollmesh.core.config import WorkerConfig
from rollmesh.core.errors import InfraError
from rollmesh.core.logs import get_logger
from rollmesh.envs import starter
from rollmesh.envs.containment import (
    CgroupLimits,
    ControlGroup,
    bwrap_argv,
    interpreter_of,
    named_files,
    new_group,
    sweep_groups,
    visible_paths,
)
from rollmesh.envs.scratch import sweep
from rollmesh.envs.spawner import CONTROL
from rollmesh.envs.spawning import (
    Spawned,
    Spawner,
    end_processes,
    give_access,
    process_spawner,
    slot_uid,
)

log = get_logger()

Mode = Literal["bwrap", "uid", "none"]
Network = Literal["session", "host"]
Serve = Callable[[socket.socket], Awaitable[Callable[[], None]]]
"""Serves the sessions' endpoint on one more listening socket; returns a function that stops it."""

STARTER = starter.__file__
START_S = 30.0
"""Seconds until a slot's program must begin."""
PROBE = """i=$1; shift
for f; do test -r "$f" || { echo "$f: not readable there"; exit 3; }; done
exec "$i" --version"""
NAMED = re.compile(r"(python|node|bash|perl|ruby|deno|bun)[0-9.]*")
"""Interpreters that answer --version."""
NPROC_PER_NAMESPACE = (5, 14)
"""First Linux version that counts processes by user and user namespace."""
CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid; see unix(7)."""
SCM_CREDENTIALS = 2
MAX_REASON_BYTES, ANCILLARY_BYTES = 4096, 256
INTERPRETER = getattr(sys, "_base_executable", sys.executable)
"""Without the virtual environment, which the starter does not need."""


async def do_nothing() -> None:
    """Default for a program without a slot of its own."""


class Command(msgspec.Struct, frozen=True):
    """Program to run; `env` is its whole environment, except the mark."""

    argv: tuple[str, ...]
    folder: Path
    """Working directory, which it may write."""
    env: Mapping[str, str]
    writable: tuple[Path, ...] = ()
    """More folders that it may write."""
    read_only: tuple[Path, ...] = ()
    """Files and folders of the host that it may read, under bwrap."""
    base_url: str = ""
    """Endpoint that it calls; '' is none, and under bwrap it then has no network at all."""
    network: Network = "session"
    """Under bwrap: the endpoint only, or the host's network."""


class IsolationSettings(msgspec.Struct, frozen=True):
    """Settings of [worker] for agents' programs."""

    mode: Literal["auto", "bwrap", "uid", "none"] = "none"
    first_uid: int = 200_000
    num_uids: int = 1024
    limits: CgroupLimits = CgroupLimits()


class ProgramSlot(msgspec.Struct):
    """Environment of one program, open while it runs."""

    mode: Mode
    argv: tuple[str, ...]
    passed: tuple[int, ...] = ()
    """Descriptors that it inherits."""
    begin: Callable[[], Awaitable[None]] = do_nothing
    """Awaited after the start; InfraError if the program cannot be executed."""
    end: Callable[[], Awaitable[None]] = do_nothing
    """Kills its processes; returns when all have ended."""
    spawn: Callable[[Mapping[str, str], int], Spawned] | None = None
    """Starts it with an environment and an output through the spawner, if the worker cannot."""

    async def start(
        self, folder: Path, env: Mapping[str, str], output: int
    ) -> asyncio.subprocess.Process | Spawned:
        """Start the program in the slot; OSError or InfraError."""
        if self.spawn is not None:
            return self.spawn(env, output)
        return await asyncio.create_subprocess_exec(
            *self.argv,
            cwd=folder,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=self.passed,
            start_new_session=True,
        )


class Isolation:
    """Opens slots; one object per process, see `use_isolation`."""

    def __init__(self, settings: IsolationSettings, serve: Serve | None = None) -> None:
        """`serve` is the worker's; without it network namespaces have no endpoint."""
        self._settings = settings
        self._serve = serve
        self._modes: dict[tuple[str, Network], asyncio.Future[Mode]] = {}
        self._has_warned = False
        self.shown = "none" if settings.mode == "none" else ""
        """The weakest mode that a program runs in, for display; '' before the first."""

    @contextlib.asynccontextmanager
    async def slot(self, command: Command) -> AsyncIterator[ProgramSlot]:
        """Provide a slot for `command` in the right mode; InfraError if there is none."""
        mode = await self._mode_for(command)
        async with self._open(mode, command) as slot:
            yield slot

    async def _mode_for(self, command: Command) -> Mode:
        if self._settings.mode == "none":
            if not self._has_warned:
                self._has_warned = True
                self._warn_none(command.argv[0], 'set worker.isolation = "auto"')
            return "none"
        key = (command.argv[0], command.network)
        found = self._modes.get(key)
        if found is None:
            found = self._modes[key] = asyncio.ensure_future(self._find_mode(command))
        try:
            return await asyncio.shield(found)
        except InfraError:
            self._modes.pop(key, None)
            raise

    async def _find_mode(self, command: Command) -> Mode:
        wanted = self._settings.mode
        modes: tuple[Mode, ...] = ("bwrap", "uid") if wanted == "auto" else (wanted,)
        program = command.argv[0]
        for mode in modes:
            why = await self._why_not(mode, command)
            if not why:
                log.info("isolation.chosen", mode=mode, program=program, network=command.network)
                self._show(mode)
                return mode
            log.warning("isolation.refused", mode=mode, program=program, reason=why)
            if wanted != "auto":
                raise InfraError(f'worker.isolation = "{mode}" cannot run {program}: {why}')
        self._warn_none(program, "install bubblewrap, or run the worker as root")
        self._show("none")
        return "none"

    def _warn_none(self, program: str, remedy: str) -> None:
        effect = "it can read and change what this process's user can"
        log.warning("isolation.none", program=program, effect=effect, remedy=remedy)

    def _show(self, mode: Mode) -> None:
        order = ("", "bwrap", "uid", "none")
        self.shown = max(self.shown, mode, key=order.index)

    async def _why_not(self, mode: Mode, command: Command) -> str:
        """Return why the program's interpreter does not run in a slot of `mode`; '' if it does."""
        if why := self._missing(mode, command):
            return why
        try:
            return await self._probe(mode, command)
        except InfraError as error:
            return str(error)

    def _missing(self, mode: Mode, command: Command) -> str:
        if mode == "uid":
            if os.geteuid() == 0 or process_spawner() is not None:
                return ""
            return "it needs root, to become another user, or rollmesh worker --user"
        if not sys.platform.startswith("linux") or shutil.which("bwrap") is None:
            return "bwrap: not installed (Debian, Ubuntu: apt install bubblewrap)"
        if command.network == "session" and command.base_url:
            host = urlsplit(command.base_url).hostname or ""
            if self._serve is None:
                return 'the endpoint is not of this process; use network = "host"'
            if not (is_loopback(host) or host == "0.0.0.0"):
                return f'{host}: an endpoint beyond loopback; use network = "host"'
        return ""

    async def _probe(self, mode: Mode, command: Command) -> str:
        interpreter = interpreter_of(command.argv[0], command.env)
        files = named_files(command.argv)
        is_named = NAMED.fullmatch(os.path.basename(interpreter))
        last = interpreter if is_named else "/usr/bin/true"
        if not is_named and os.path.isabs(interpreter):
            files.append(interpreter)
        probe = msgspec.structs.replace(
            command,
            argv=("/bin/sh", "-c", PROBE, "sh", last, *files),
            read_only=(*command.read_only, *visible_paths(command.argv, command.env)),
        )
        async with self._open(mode, probe) as slot:
            output = ProbeOutput()
            try:
                process = await slot.start(probe.folder, probe.env, output.writing)
            except OSError as error:
                output.close()
                return f"{slot.argv[0]}: {error.strerror}"
            try:
                why = await _begun(slot)
                async with asyncio.timeout(START_S):
                    code = await process.wait()
            except TimeoutError:
                return f"{interpreter}: it did not answer within {START_S:g} s"
            finally:
                await asyncio.shield(_killed(process))
                last_line = output.close()
            return "" if code == 0 else last_line or why or f"{interpreter}: exit code {code}"

    @contextlib.asynccontextmanager
    async def _open(self, mode: Mode, command: Command) -> AsyncIterator[ProgramSlot]:
        if mode == "none":
            yield ProgramSlot("none", command.argv)
            return
        stack = contextlib.AsyncExitStack()
        try:
            yield await self._prepare(mode, command, stack)
        finally:
            # A second cancellation must not leave processes or groups behind.
            await asyncio.shield(asyncio.ensure_future(stack.aclose()))

    async def _prepare(
        self, mode: Mode, command: Command, stack: contextlib.AsyncExitStack
    ) -> ProgramSlot:
        settings, uid = self._settings, 0
        if mode == "uid":
            taken = slot_uid(settings.first_uid, settings.num_uids)
            uid = await asyncio.to_thread(taken.__enter__)
            stack.push_async_callback(asyncio.to_thread, taken.__exit__, None, None, None)
            for folder in _writable(command):
                await asyncio.to_thread(give_access, folder, uid)
        group = await asyncio.to_thread(new_group, settings.limits)
        if group is not None:
            stack.push_async_callback(asyncio.to_thread, group.close)
        starting = _StarterExchange(command, mode, uid, group, self._serve)
        stack.push_async_callback(starting.close)
        argv = starting.argv(settings.limits)
        spawner = process_spawner() if mode == "uid" else None
        spawn = None if spawner is None else functools.partial(starting.spawn, spawner, argv)
        return ProgramSlot(mode, argv, starting.passed, starting.begin, starting.end, spawn)


class ProbeOutput:
    """A pipe for the short output of a probe."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()

    def close(self) -> str:
        """Close the pipe; return the last line written."""
        os.close(self.writing)
        os.set_blocking(self._reading, False)
        try:
            text = os.read(self._reading, 4096).decode("utf-8", "replace")
        except BlockingIOError:
            text = ""
        os.close(self._reading)
        return next((line for line in reversed(text.splitlines()) if line.strip()), "")


class _StarterExchange:
    """The communication with the starter of one slot."""

    def __init__(
        self,
        command: Command,
        mode: Mode,
        uid: int,
        group: ControlGroup | None,
        serve: Serve | None,
    ) -> None:
        self._command, self._mode, self._uid = command, mode, uid
        self._group, self._serve = group, serve
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._ours.setblocking(False)
        self._close_endpoint: Callable[[], None] | None = None
        self._first = -1
        """Pidfd of the first process of the slot's pid namespace."""

    @property
    def passed(self) -> tuple[int, ...]:
        """Descriptors that the starter inherits."""
        return (self._theirs.fileno(),)

    def argv(self, limits: CgroupLimits) -> tuple[str, ...]:
        """Return the command line that prepares the slot and then executes the program."""
        command, is_bwrap = self._command, self._mode == "bwrap"
        is_forwarded = is_bwrap and command.network == "session" and command.base_url
        url = urlsplit(command.base_url if is_forwarded else "")
        host = "127.0.0.1" if url.hostname == "localhost" else url.hostname or ""
        num_processes = limits.num_processes
        if is_bwrap and (os.geteuid() == 0 or _kernel() < NPROC_PER_NAMESPACE):
            num_processes = 0  # unlimited for root; older kernels count the worker's too
        has_group = self._group is not None
        is_spawned = self._uid and process_spawner() is not None
        uid, control = (0, CONTROL) if is_spawned else (self._uid, self._theirs.fileno())
        starter_argv = (
            *(INTERPRETER, "-I", "-S", STARTER, str(control)),
            *(host, str((url.port or 80) if host else 0), str(uid)),
            *(("0", "0") if has_group else (str(num_processes), str(limits.memory_bytes))),
            *command.argv,
        )
        if not is_bwrap:
            return starter_argv
        seen = (*command.read_only, *visible_paths(command.argv, command.env), Path(STARTER))
        return tuple(
            bwrap_argv(
                starter_argv,
                network=command.network,
                read_only=seen,
                writable=_writable(command),
                folder=command.folder,
            )
        )

    async def begin(self) -> None:
        """Let the program start, with its endpoint served and its group applied."""
        self._theirs.close()
        program = self._command.argv[0]
        try:
            async with asyncio.timeout(START_S):
                data, ancillary = await _received(self._ours)
                if data == b".":
                    await self._take(ancillary)
                    self._ours.send(b".")
                    data, _ = await _received(self._ours)
                elif not data:
                    data = b"its slot could not be made"
        except TimeoutError:
            raise InfraError(f"{program}: not begun within {START_S:g} s") from None
        except OSError as error:
            raise InfraError(f"{program}: its slot could not be made: {error}") from None
        if data:
            raise InfraError(f"{program}: cannot be run: {data.decode('utf-8', 'replace')}")

    def spawn(
        self, spawner: Spawner, argv: tuple[str, ...], env: Mapping[str, str], output: int
    ) -> Spawned:
        """Start the program as the slot's user through the spawner."""
        control, folder = self._theirs.fileno(), self._command.folder
        reading = spawner.run(self._uid, argv, folder, env, output, control)
        return Spawned(reading, functools.partial(spawner.kill, self._uid))

    async def end(self) -> None:
        """Kill all processes of the slot; return when they have ended."""
        if self._uid:
            await asyncio.to_thread(end_processes, self._uid)
            if (spawner := process_spawner()) is not None:
                await asyncio.to_thread(spawner.share, self._uid, _writable(self._command))
        if self._first >= 0:
            descriptor, self._first = self._first, -1
            await asyncio.to_thread(_end_namespace, descriptor)

    async def close(self) -> None:
        """End remaining processes and release all resources."""
        await self.end()
        self._ours.close()
        self._theirs.close()
        if self._close_endpoint is not None:
            self._close_endpoint()

    async def _take(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Serve the starter's listening socket, and apply limits to the starter by its pid."""
        for _, kind, raw in ancillary:
            if kind == socket.SCM_RIGHTS:
                listening = socket.socket(fileno=int.from_bytes(raw[:4], sys.byteorder))
                assert self._serve is not None
                self._close_endpoint = await self._serve(listening)
            elif kind == SCM_CREDENTIALS:
                self._hold(CREDENTIALS.unpack(raw[: CREDENTIALS.size])[0])

    def _hold(self, pid: int) -> None:
        if self._group is not None:
            self._group.add(pid)
        if self._mode == "bwrap":
            status = Path(f"/proc/{pid}/status").read_text()
            self._first = os.pidfd_open(int(status.partition("\nPPid:")[2].split()[0]))


async def _begun(slot: ProgramSlot) -> str:
    """Return why the slot's program does not start; '' if it does."""
    try:
        await slot.begin()
    except InfraError as error:
        return str(error)
    return ""


async def _killed(process: asyncio.subprocess.Process | Spawned) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _received(connection: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Receive one message and its ancillary data; b'' at the end of the connection."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    data, ancillary, _, _ = connection.recvmsg(MAX_REASON_BYTES, ANCILLARY_BYTES)
    return data, ancillary


def _end_namespace(descriptor: int) -> None:
    """Kill the first process of a pid namespace and wait for its end, which is the last there."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(START_S * 1000):
        log.warning("isolation.left", reason="processes of a slot did not end")
    os.close(descriptor)


def _writable(command: Command) -> tuple[Path, ...]:
    return tuple(dict.fromkeys((command.folder, *command.writable)))


def _kernel() -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return tuple(map(int, found.groups())) if found else (0, 0)


_in_use = [Isolation(IsolationSettings())]


def use_isolation(isolation: Isolation) -> None:
    """Run this process's programs in slots of `isolation`; until then they run without."""
    _in_use[0] = isolation


def isolate_programs(config: WorkerConfig, serve: Serve) -> None:
    """Run this process's programs under the settings of [worker], their endpoint served by `serve`.

    Leftovers of killed processes are removed first.
    """
    remove_left_behind()
    limits = CgroupLimits(
        memory_bytes=config.program_memory_bytes,
        num_processes=config.program_max_processes,
        num_cpus=config.program_cpus,
    )
    settings = IsolationSettings(
        mode=config.isolation,
        first_uid=config.isolation_first_uid,
        num_uids=config.isolation_num_uids,
        limits=limits,
    )
    use_isolation(Isolation(settings, serve))


def remove_left_behind() -> None:
    """Remove control groups and scratch folders of killed processes."""
    sweep_groups()
    sweep()


def current_isolation() -> Isolation:
    """Return the isolation of this process."""
    return _in_use[0]
