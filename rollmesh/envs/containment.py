"""Containment of a program slot: control groups, and bubblewrap's command line.

- Control groups limit memory, processes and CPU of a slot. cgroups(7) version 1 or 2 is used where
  this process may create groups; elsewhere resource limits are a partial replacement.
- A group is removed when its slot ends; with version 2 its remaining processes are killed first.
  `sweep_groups` removes those of killed workers.
- Under bwrap only listed paths are visible, read-only: system folders, Python's own, the program
  with its interpreter, and paths in its environment.
- /tmp, /dev and /proc are the slot's own; home and working folder keep their paths.
"""

import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rollmesh.core.logs import get_logger

log = get_logger()

ROOT = Path("/sys/fs/cgroup")
PREFIX = "rollmesh-"
CPU_PERIOD_US = 100_000
REMOVE_S = 2.0
"""Time for which removing a group is retried while processes are leaving it."""
_numbers = itertools.count()


class CgroupLimits(msgspec.Struct, frozen=True):
    """Limits of one slot; 0 is no limit."""

    memory_bytes: int = 0
    num_processes: int = 0
    num_cpus: float = 0.0

    def files(self, *, is_unified: bool) -> dict[str, dict[str, str]]:
        """Return the files of a group and their contents, by controller."""
        quota = f"{int(self.num_cpus * CPU_PERIOD_US)}"
        found: dict[str, dict[str, str]] = {}
        if self.memory_bytes:
            name = "memory.max" if is_unified else "memory.limit_in_bytes"
            found["memory"] = {name: str(self.memory_bytes)}
        if self.num_processes:
            found["pids"] = {"pids.max": str(self.num_processes)}
        if self.num_cpus and is_unified:
            found["cpu"] = {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
        elif self.num_cpus:
            found["cpu"] = {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": quota}
        return found


class ControlGroup:
    """Folders of one slot's group: one with version 2, one for each controller with 1."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._folders = folders

    def add(self, pid: int) -> None:
        """Put a process and all its future children into the group; OSError."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Kill its processes, if the kernel can, and remove it."""
        until_s = time.monotonic() + REMOVE_S
        for folder in self._folders:
            with contextlib.suppress(OSError):
                (folder / "cgroup.kill").write_text("1")
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > until_s:
                        log.warning("cgroup.left", folder=str(folder))
                        break
                    time.sleep(0.01)


def new_group(limits: CgroupLimits) -> ControlGroup | None:
    """Create a group with these limits; None if nothing is limited or it cannot be created."""
    is_unified = (ROOT / "cgroup.controllers").exists()
    files = limits.files(is_unified=is_unified)
    if not files:
        return None
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    made: list[Path] = []
    try:
        if is_unified:
            made.append(_make_in(_own_folder(""), name, files))
        else:
            for controller, values in files.items():
                folder = _own_folder(controller) / name
                folder.mkdir()
                made.append(folder)
                _write(folder, values)
    except OSError:
        ControlGroup(tuple(made)).close()
        return None
    return ControlGroup(tuple(made))


def sweep_groups() -> None:
    """Remove the empty groups of processes that have ended."""
    try:
        if (ROOT / "cgroup.controllers").exists():
            own = _own_folder("")
            places = {own, own.parent}
        else:
            controllers = CgroupLimits(1, 1, 1.0).files(is_unified=False)
            places = {_own_folder(controller) for controller in controllers}
    except OSError:
        return
    for place in places:
        remove_ended(place)


def remove_ended(place: Path) -> None:
    """Remove the empty groups in `place` of processes that have ended.

    A group with processes is kept: its owner may be in another pid namespace.
    """
    for folder in place.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make_in(parent: Path, name: str, files: dict[str, dict[str, str]]) -> Path:
    """Create a version 2 group beside this process, or else beside its group, since a group with
    processes may not delegate controllers."""
    for place in (parent, parent.parent):
        folder = place / name
        try:
            with contextlib.suppress(OSError):
                words = " ".join(f"+{controller}" for controller in files)
                (place / "cgroup.subtree_control").write_text(words)
            folder.mkdir()
            try:
                for values in files.values():
                    _write(folder, values)
            except OSError:
                folder.rmdir()
                raise
        except OSError:
            if place == parent.parent:
                raise
            continue
        return folder
    raise AssertionError


def _write(folder: Path, values: dict[str, str]) -> None:
    for name, text in values.items():
        with open(folder / name, "r+") as file:
            file.write(text)


def _own_folder(controller: str) -> Path:
    """Return this process's folder in the hierarchy of `controller`; '' is version 2's."""
    root = ROOT / controller
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            folder = root / path.lstrip("/")
            return folder if folder.is_dir() else root
    return root


SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store")
ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "fonts", "group", "host.conf"),
    *("hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "locale.alias"),
    *("mime.types", "nsswitch.conf", "passwd", "pki", "protocols", "resolv.conf", "services"),
    *("ssl", "timezone"),
)
NAMESPACES = ("user", "pid", "ipc", "uts")
PREFIX_SIGNS = ("pyvenv.cfg", "lib/node_modules", "include/node", "conda-meta", "lib/python3*")
"""Entries beside an installation's `bin`."""
MAX_LINKS = 16


def bwrap_argv(
    argv: Sequence[str],
    *,
    network: str,
    read_only: Iterable[Path],
    writable: Iterable[Path],
    folder: Path,
) -> list[str]:
    """Return the words of bubblewrap, to be followed by the program."""
    words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-cgroup-try"]
    words += [f"--unshare-{name}" for name in NAMESPACES]
    words += ["--unshare-net"] if network != "host" else []
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in SYSTEM:
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    bound: list[Path] = []
    for path in sorted(set(read_only), key=lambda each: len(str(each))):
        if any(path.is_relative_to(other) for other in bound):
            continue
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        else:
            words += ["--ro-bind-try", str(path), str(path)]
        bound.append(path)  # paths below a link are reached through it
    for path in writable:
        words += ["--bind", str(path), str(path)]
    return [*words, "--chdir", str(folder), "--remount-ro", "/", "--", *argv]


def visible_paths(argv: Sequence[str], env: Mapping[str, str]) -> list[Path]:
    """Return the program, its interpreter, their installations, and files among its arguments."""
    found = [Path(sys.base_prefix), Path(sys.prefix)]
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    for start in (program, interpreter_of(argv[0], env), sys.executable):
        for hop in _hops(start):
            found += [hop, *_installation(hop)]
    found += map(Path, named_files(argv))
    return [path for path in found if not _is_system(path)]


def named_files(argv: Sequence[str]) -> list[str]:
    """Return the arguments that are absolute paths of files."""
    return [word for word in argv if os.path.isabs(word) and os.path.isfile(word)]


def interpreter_of(program: str, env: Mapping[str, str]) -> str:
    """Return the executable that runs `program`: itself, or the interpreter in its first line."""
    path = shutil.which(program, path=env.get("PATH", os.defpath))
    if path is None:
        return program
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
    except OSError:
        return path
    if not first.startswith(b"#!"):
        return path
    words = first[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return shutil.which(words[0], path=env.get("PATH", os.defpath)) or path if words else path


def _hops(start: str | None) -> Iterator[Path]:
    """Yield a path, and each target of its symbolic links."""
    path = Path(os.path.abspath(start)) if start else None
    for _ in range(MAX_LINKS):
        if path is None:
            return
        yield path
        real = path.parent.resolve() / path.name
        if real != path:
            yield real
        target = os.readlink(real) if os.path.islink(real) else None
        path = Path(os.path.normpath(real.parent / target)) if target else None


def _installation(program: Path) -> list[Path]:
    """Return the folder of a virtual environment, of Python or of Node, whose `bin` holds
    `program`."""
    prefix = program.parent.parent
    if program.parent.name != "bin" or prefix in (Path("/"), Path.home(), *Path.home().parents):
        return []
    return [prefix] if any(any(prefix.glob(sign)) for sign in PREFIX_SIGNS) else []


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SYSTEM)
