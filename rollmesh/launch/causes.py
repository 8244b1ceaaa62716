"""What ended a process, in a few words: a signal, an exit code, or want of memory.

Invariant: memory is named only where the system or Python itself said so: the kernel counts the
processes that it kills for want of memory, in a cgroup's memory.events (cgroup v2, kernel
documentation admin-guide/cgroup-v2.rst) and, where no cgroup tells, in /proc/vmstat. Driven by
child.py, which asks at a process's start and end.
"""

import signal
from pathlib import Path

OUT_OF_MEMORY = "out of memory"


def num_oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes that the kernel has killed for want of memory: of our cgroup, or of the machine."""
    for file in (*_events_files(proc, cgroups), proc / "vmstat"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def cause_of(code: int, last_line: str, *, may_be_oom: bool) -> str:
    """The cause of an exit; `code` is negative for a signal, as in Popen.returncode."""
    if last_line.startswith("MemoryError") or (code == -signal.SIGKILL and may_be_oom):
        return OUT_OF_MEMORY
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _events_files(proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    # Version 2 has one line, `0::/path`; below version 1 there is no such file.
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [cgroups / path / "memory.events" for path in paths]
