"""Both processes are started, all pipelines admitted, and each process is restarted alone."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.cli.main import main
from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.transport import (
    AdmissionAnswer,
    SchedulerQuestion,
    ask_admission,
    ask_scheduler,
)
from rollmesh.scheduler.planning.state import NodePhase, PipelinePhase
from rollmesh.scheduler.service.explain import FleetExplanation, PipelineView
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    ClaimPipeline,
    ClearProgress,
    CoordinatorHello,
    GpuPriority,
    HooksWired,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReadScheduler,
    ReportProgress,
    RequestGpus,
    ResizeWorkers,
    TakeGpus,
    TicketMoved,
    TicketState,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
    signed,
)
from rollmesh.wire.sockets import Dialer, wait
from tests.ports import free_ports
from tests.unit.scheduler.admission.claimed_run import claimed_run

HookAsk = RequestGpus | NotifyReleaseGpus | NotifyReleaseThenRequestGpus
PATIENCE_S = 100.0
LOOK_S = 0.1

FILE = """
bind = "tcp://127.0.0.1:{}"
http_bind = "127.0.0.1:{}"
journal = "{}"

[service]
node_grace_s = 3

[[nodes]]
name = "here"
gpus = 4

[pipelines.math]
clusters.actor_train = 2
workers = 4

[pipelines.code]
clusters.actor_train = [2, 3]
generation = [0, 1, 2, 3]
"""


class Running:
    """A process of `rollmesh scheduler up`, and questions to it."""

    def __init__(self, folder: Path) -> None:
        service, http = free_ports(2)
        self.address = f"tcp://127.0.0.1:{service}"
        self.admission = folder / "journal" / "admission.sock"
        self.file = folder / "scheduler.toml"
        self.file.write_text(FILE.format(service, http, folder / "journal"))
        words = ("scheduler", "up", "--no-keys", str(self.file))
        command = [sys.executable, "-m", "rollmesh.cli.main", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def token(self, pipeline_id: str) -> str:
        """The pipeline's token, from admission's folder."""
        return (self.admission.parent / "tokens" / pipeline_id).read_text().strip()

    def pid_of(self, verb: str) -> int:
        """The pid of the running child with that verb; 0 if there is none."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if verb in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
        return 0

    def seen(self) -> FleetExplanation:
        answer = self.ask_scheduler(self.address, ReadScheduler(new_id("read")))
        return msgspec.json.decode(answer.body, type=FleetExplanation)

    def ask_scheduler(self, address: str, question: SchedulerQuestion) -> AdmissionAnswer:
        return ask_scheduler(address, question, patience_s=PATIENCE_S)

    def of(self, pipeline_id: str) -> PipelineView:
        (only,) = [each for each in self.seen().pipelines if each.pipeline_id == pipeline_id]
        return only

    def phases(self) -> dict[str, PipelinePhase]:
        return {each.pipeline_id: each.phase for each in self.seen().pipelines}

    def until(self, condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None
            assert time.monotonic() < give_up_s
            threading.Event().wait(LOOK_S)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    with running.process:
        try:
            running.until(lambda: len(running.phases()) == 2)
            running.until(lambda: set(running.phases().values()) == {PipelinePhase.ADMITTED})
            yield running
        finally:
            running.process.terminate()


class Tenant:
    """The hooks and the coordinator of one pipeline; each resize is done at once."""

    def __init__(self, running: Running, pipeline_id: str) -> None:
        self._pipeline_id = pipeline_id
        self._token = running.token(pipeline_id)
        self._dialer = Dialer(running.address, new_id("tenant"))
        self._truth = {rank: WorkerTruth(rank, WorkerPhase.ASLEEP, 0) for rank in range(4)}

    def send(self, message: AnyMessage) -> None:
        self._dialer.send(Packet(signed(message, self._token)))

    def until(self, state: TicketState, question: HookAsk) -> tuple[int, ...]:
        """Send `question` until its ticket has `state`; return the ticket's GPUs."""
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s:
            self.send(HooksWired(self._pipeline_id))
            self.send(CoordinatorHello(self._pipeline_id, tuple(self._truth.values())))
            self.send(question)
            wait([self._dialer], None, LOOK_S)
            for packet in self._dialer.receive():
                match packet.message:
                    case TicketMoved(question.key, its_state, gpus) if its_state is state:
                        return gpus
                    case TicketMoved(key, TicketState.OFFERED) as moved:
                        self.send(TakeGpus(key, moved.offer))
                    case ResizeWorkers() as resize:
                        self._do(resize)
        raise AssertionError(f"{question} never became {state}")

    def close(self) -> None:
        self._dialer.close()

    def _do(self, resize: ResizeWorkers) -> None:
        for change in resize.changes:
            phase = WorkerPhase.AWAKE if change.wakes else WorkerPhase.ASLEEP
            self._truth[change.rank] = WorkerTruth(change.rank, phase, change.epoch)
        truth = tuple(self._truth.values())
        self.send(WorkersResized(self._pipeline_id, resize.resize_id, truth))


def test_without_admission_every_run_time_operation_still_answers(running: Running) -> None:
    """The restarted process is back with its whole state."""
    os.kill(running.pid_of("admission"), signal.SIGSTOP)
    with pytest.raises(AddressError, match="no answer of an admission process"):
        ask_admission(running.admission, AdmitPipeline("k", "math"), patience_s=1.0)
    tenant = Tenant(running, "math")
    train, generate = GpuPriority.ACTOR_TRAINING, GpuPriority.GENERATION
    granted, released = TicketState.GRANTED, TicketState.RELEASED
    assert tenant.until(granted, RequestGpus("1", "math", "actor_train", train)) == (0, 1)
    hand_over = NotifyReleaseThenRequestGpus(
        "2", "math", "actor_train", GENERATION_CLUSTER, generate, step_target_estimate=8
    )
    assert tenant.until(granted, hand_over)
    tenant.send(ReportProgress("math", "train", 1, 8, 3))
    running.until(lambda: running.of("math").remaining == 5)
    tenant.send(ClearProgress("math", "train", 1))
    running.until(lambda: not running.of("math").has_demand)
    assert tenant.until(granted, RequestGpus("3", "math", GENERATION_CLUSTER, generate))
    tenant.until(released, NotifyReleaseGpus("4", "math", GENERATION_CLUSTER))
    tenant.close()
    assert running.seen().num_free == 4
    killed = running.pid_of("admission")
    os.kill(killed, signal.SIGKILL)
    running.until(lambda: running.pid_of("admission") not in (0, killed))
    question = AdmitPipeline(new_id("k"), "math")
    assert ask_admission(running.admission, question, patience_s=PATIENCE_S).ok


def test_a_killed_pipeline_holds_no_gpus_and_may_be_admitted_again(
    running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--admission", str(running.admission)]
    with claimed_run(tmp_path) as run:
        claim = ClaimPipeline(new_id("k"), "math", run.claim, token=running.token("math"))
        assert running.ask_scheduler(running.address, claim).ok
        tenant = Tenant(running, "math")
        train = RequestGpus("1", "math", "actor_train", GpuPriority.ACTOR_TRAINING)
        tenant.until(TicketState.GRANTED, train)
        tenant.close()
        assert running.seen().num_free == 2
        assert main(["scheduler", "kill", "math", *words]) == 0
        assert run.launch.wait(PATIENCE_S) == -signal.SIGKILL
    assert "math: 1 processes killed, and its GPUs are free;" in capfd.readouterr().out
    assert running.seen().num_free == 4
    assert running.of("math").phase is PipelinePhase.REGISTERED
    assert main(["scheduler", "admit", "math", *words]) == 0
    assert running.phases()["math"] is PipelinePhase.ADMITTED


def test_a_killed_service_restarts_with_its_whole_state(running: Running) -> None:
    before, killed = running.seen(), running.pid_of("serve")
    os.kill(killed, signal.SIGKILL)
    running.until(lambda: running.pid_of("serve") not in (0, killed))
    after = running.seen()
    assert after.scheduler != before.scheduler
    assert after.nodes == before.nodes
    assert [each.spec for each in after.pipelines] == [each.spec for each in before.pipelines]
    assert GENERATION_CLUSTER not in after.pipelines[0].spec.clusters


def test_a_service_that_fails_to_restart_is_started_until_it_runs(
    running: Running,
) -> None:
    before, killed = running.seen(), running.pid_of("serve")
    away = running.file.rename(running.file.with_suffix(".away"))
    os.kill(killed, signal.SIGKILL)
    tried: set[int] = set()

    def has_tried_twice() -> bool:
        tried.add(running.pid_of("serve"))
        return len(tried - {0, killed}) >= 2

    running.until(has_tried_twice)
    away.rename(running.file)
    assert running.seen().scheduler != before.scheduler


def test_a_node_joins_by_its_agent_is_drained_and_is_down_without_it(running: Running) -> None:
    def phase() -> NodePhase | None:
        return {node.name: node.phase for node in running.seen().nodes}.get("b")

    words = ["agent", "--scheduler", running.address, "--name", "b", "--gpus", "2"]
    argv = [sys.executable, "-m", "rollmesh.cli.main", "scheduler", *words, "--labels", "x,y"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as agent:
        running.until(lambda: phase() is NodePhase.UP)
        (node,) = [each for each in running.seen().nodes if each.name == "b"]
        assert (node.gpus, node.labels) == ((4, 5), ("x", "y"))
        assert main(["scheduler", "drain", "b", "--scheduler", running.address]) == 0
        assert phase() is NodePhase.DRAINING
        assert main(["scheduler", "drain", "b", "--undo", "--scheduler", running.address]) == 0
        assert phase() is NodePhase.UP
        agent.terminate()
        assert agent.wait(PATIENCE_S) == 0
    running.until(lambda: phase() is NodePhase.DOWN)
    larger = [*argv, "--gpus", "3"]
    refused = subprocess.run(larger, capture_output=True, text=True, timeout=100, check=False)
    assert refused.returncode == 2
    assert "rollmesh: node 'b' had 2 GPUs and comes back with 3" in refused.stderr


def test_both_children_end_with_the_supervisor(running: Running) -> None:
    children = psutil.Process(running.process.pid).children()
    assert len(children) == 2
    running.process.kill()
    gone, alive = psutil.wait_procs(children, PATIENCE_S)
    assert (len(gone), alive) == (2, [])
