"""The cause of a process's end is reported, as far as the system records it."""

from pathlib import Path

import pytest

from rollmesh.launch.child import exit_cause, num_oom_kills
from rollmesh.launch.machine import OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("code", "last_line", "may_be_oom", "cause"),
    [
        (-9, "", False, "killed by signal 9"),
        (-9, "", True, OUT_OF_MEMORY),
        (-11, "", True, "killed by signal 11"),
        (1, "ValueError: no", False, "exit code 1"),
        (1, "MemoryError", False, OUT_OF_MEMORY),
        (0, "", True, "exit code 0"),
    ],
)
def test_a_cause_is_a_signal_a_code_or_lack_of_memory(
    code: int, last_line: str, may_be_oom: bool, cause: str
) -> None:
    assert exit_cause(code, last_line, may_be_oom=may_be_oom) == cause


@pytest.fixture
def system(tmp_path: Path) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a process in a cgroup of its own."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/pods/a\n")
    (proc / "vmstat").write_text("pgfault 12\noom_kill 7\n")
    (cgroups / "pods" / "a").mkdir(parents=True)
    (cgroups / "pods" / "a" / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    return proc, cgroups


def test_the_cgroups_counter_takes_precedence_over_the_machines(system: tuple[Path, Path]) -> None:
    assert num_oom_kills(*system) == 3


def test_without_a_cgroup_the_machines_counter_is_used(system: tuple[Path, Path]) -> None:
    (system[1] / "pods" / "a" / "memory.events").unlink()
    assert num_oom_kills(*system) == 7


def test_without_kernel_counters_no_oom_kill_is_counted(tmp_path: Path) -> None:
    assert num_oom_kills(tmp_path / "proc", tmp_path / "cgroup") == 0
