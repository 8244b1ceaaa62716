"""A Slurm cluster on this machine: a network namespace, a host name and a slurmd for each node.

    login (slurmctld, sbatch, squeue) ==rollmesh.testing.network== n0, n1, ... (a slurmd each)

- Needs root, Debian's slurm-wlm and munge. All its files are in a temporary folder; nothing in /etc
  is read or written.
- Nodes share the file system and the process table. They have addresses and host names of their
  own, and reach neither each other's loopback nor other machines.
- No cgroups (proctrack/linuxproc, task/none), so that it works in a container, too.
"""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from rollmesh.core.child_process import ManagedProcess, open_output
from rollmesh.testing.network import HostNetwork, why_no_network

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare")
LOGIN = "login"
CPUS = 16
"""CPUs that a node claims to have."""
START_S = 60.0
STOP_S = 15.0
POLL_S = 0.2

SETTINGS = """\
ClusterName=test
SlurmctldHost={login}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait=30
SlurmdTimeout=60
MinJobAge=600
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
"""


def why_not() -> str:
    """Return why no cluster can run here; '' if it can."""
    if missing := [each for each in PROGRAMS if not shutil.which(each)]:
        return f"{missing[0]} is not installed"
    return why_no_network()


class SlurmCluster:
    """A cluster, for the time of a `with` block."""

    def __init__(self, num_nodes: int = 3, num_gpus: int = 0) -> None:
        """`num_gpus` is the number of GPUs that each node claims to have."""
        self.nodes = [f"n{number}" for number in range(num_nodes)]
        self.network: HostNetwork
        self._num_gpus = num_gpus
        self._stack = ExitStack()
        self._daemons: dict[str, ManagedProcess] = {}
        self.folder: Path

    def __enter__(self) -> "SlurmCluster":
        with ExitStack() as undo:
            self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.network = undo.enter_context(HostNetwork([LOGIN, *self.nodes]))
            self._configure()
            undo.callback(self._stop)
            self._start("munged", LOGIN, self._munged())
            self._start("slurmctld", LOGIN, ["slurmctld", "-D"])
            for node in self.nodes:
                self._start(node, node, ["slurmd", "-D", "-N", node])
            self._wait_until_idle()
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Slurm's programs and of a user."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, node: str, *argv: str) -> list[str]:
        """Return the command that runs `argv` on a node."""
        enter = [*self.network[node].prefix, "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", node, *argv]

    def run(
        self,
        *argv: str,
        node: str = LOGIN,
        folder: Path | None = None,
        environment: Mapping[str, str] = {},
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node and return what it wrote; with `check` it must succeed."""
        done = subprocess.run(
            self.command(node, *argv),
            cwd=folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def wait_until(
        self, is_true: Callable[[], bool], timeout_s: float, report: Callable[[], str] = str
    ) -> None:
        """Wait until a condition holds; fail with `report` if it does not in time.

        Slurm reports no events, so that the condition is checked again and again.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline_s, f"{report()}\n{self._report()}"
            has_ended = self._daemons["slurmctld"].wait_for(POLL_S)
            assert not has_ended, self._report()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        line = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def wait_for_job(self, job_id: str, states: tuple[str, ...], timeout_s: float) -> str:
        """Wait until a job has one of these states; return it."""
        self.wait_until(
            lambda: self.job(job_id)["JobState"] in states,
            timeout_s,
            lambda: f"job {job_id}: {self.job(job_id)}",
        )
        return self.job(job_id)["JobState"]

    def processes(self, node: str) -> list[psutil.Process]:
        """Return the processes on a node, slurmd included."""
        found = []
        for pid in self.network[node].pids():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def kill_node(self, node: str) -> None:
        """Kill every process on a node at once, slurmd included."""
        while found := self.processes(node):
            # None may act on the end of another: they see the processes of all nodes.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for each in found:
                    with suppress(psutil.NoSuchProcess):
                        each.send_signal(number)
            psutil.wait_procs(found, timeout=POLL_S)
            self._daemons[node].wait_for(POLL_S)

    def report_lost(self, node: str) -> None:
        """Mark a killed node as down at once, as Slurm does after SlurmdTimeout."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def state(self, node: str) -> str:
        """Return the state of a node, such as IDLE."""
        line = self.run("scontrol", "--oneliner", "show", "node", node).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)["State"]

    def _configure(self) -> None:
        address = self.network[LOGIN].address
        lines = [SETTINGS.format(login=LOGIN, address=address, folder=self.folder)]
        gpus = f" Gres=gpu:{self._num_gpus}" if self._num_gpus else ""
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
            address = self.network[node].address
            lines.append(
                f"NodeName={node} NodeAddr={address} NodeHostname={node} CPUs={CPUS}"
                f" RealMemory=1000{gpus} State=UNKNOWN\n"
            )
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        devices = [self.folder / f"gpu{number}" for number in range(self._num_gpus)]
        for device in devices:
            os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        gres = "".join(f"Name=gpu File={device}\n" for device in devices)
        (self.folder / "gres.conf").write_text(gres)
        (self.folder / "state").mkdir()
        key = os.open(self.folder / "munge.key", os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(key, os.urandom(1024))
        os.close(key)

    def _munged(self) -> list[str]:
        at = self.folder
        files = [f"--key-file={at}/munge.key", f"--socket={at}/munge.socket"]
        files += [f"--pid-file={at}/munged.pid", f"--seed-file={at}/munge.seed"]
        return ["munged", "--foreground", "--force", *files]

    def _start(self, name: str, node: str, argv: list[str]) -> None:
        with open_output(self.folder / f"{name}.out") as output:
            self._daemons[name] = ManagedProcess(
                self.command(node, *argv),
                environment=self.environment,
                stdout=output,
                stderr=output,
            )

    def _wait_until_idle(self) -> None:
        self.wait_until(lambda: all(self.state(node) == "IDLE" for node in self.nodes), START_S)

    def _report(self) -> str:
        lines = [self.run("sinfo", check=False).stdout]
        for path in sorted(self.folder.glob("*.out")):
            lines += [f"== {path.name}", *path.read_text().splitlines()[-8:]]
        return "\n".join(lines)

    def _stop(self) -> None:
        """Stop the daemons, the nodes' first."""
        for daemon in reversed(self._daemons.values()):
            daemon.stop(STOP_S)
