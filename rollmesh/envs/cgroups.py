"""Control groups of agents' programs: memory, processes and CPU of one slot together.

- Version 1 and 2 of cgroups(7) are used where this process may make groups; elsewhere there are
  none, and resource limits take their place as far as they can.
- A group is removed when its slot ends; with version 2 what is left in it is killed first.
- `sweep_groups` removes what a killed process could not.
"""

import contextlib
import itertools
import os
import time
from pathlib import Path

import msgspec

from rollmesh.core.logs import get_logger

log = get_logger()

ROOT = Path("/sys/fs/cgroup")
PREFIX = "rollmesh-"
CPU_PERIOD_US = 100_000
REMOVE_S = 2.0
"""How long a group that processes are still leaving is tried to be removed."""
_numbers = itertools.count()


class Limits(msgspec.Struct, frozen=True):
    """Limits of one slot; 0 is no limit."""

    memory_bytes: int = 0
    num_processes: int = 0
    num_cpus: float = 0.0

    def files(self, *, is_unified: bool) -> dict[str, dict[str, str]]:
        """By controller, the files of a group and what is written into them."""
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
    """The folders of one slot's group: one with version 2, one for each controller with 1."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._folders = folders

    def add(self, pid: int) -> None:
        """Put a process, and with it all that it will start, into the group; OSError."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Kill what is in it, where the kernel can, and remove it."""
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


def new_group(limits: Limits) -> ControlGroup | None:
    """A group with these limits; None where there is nothing to limit or none can be made."""
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
            controllers = Limits(1, 1, 1.0).files(is_unified=False)
            places = {_own_folder(controller) for controller in controllers}
    except OSError:
        return
    for place in places:
        remove_ended(place)


def remove_ended(place: Path) -> None:
    """Remove the empty groups in `place` of processes that have ended.

    A group with processes in it is kept: its owner may be in another pid namespace.
    """
    for folder in place.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make_in(parent: Path, name: str, files: dict[str, dict[str, str]]) -> Path:
    """A group of version 2: beside our own processes, or else beside our own group, since a group
    that holds processes may not pass controllers on."""
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
    """Where this process is in the hierarchy of `controller`; '' is version 2's."""
    root = ROOT / controller
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            folder = root / path.lstrip("/")
            return folder if folder.is_dir() else root
    return root
