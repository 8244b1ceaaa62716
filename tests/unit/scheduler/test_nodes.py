"""Node agent: join, heartbeats and visible GPUs. Supervisor: restarts of the service's process."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmesh.core.errors import AddressError, UserError
from rollmesh.scheduler.nodes.agent import (
    BEAT_S,
    REJOIN_S,
    SCHEDULER,
    SILENT_S,
    AgentPhase,
    NodeMachine,
    SilenceWarning,
    num_gpus,
    serve,
)
from rollmesh.scheduler.nodes.supervisor import ServiceSupervisor
from rollmesh.scheduler.planning.policies import make_policy
from rollmesh.scheduler.planning.state import NodePhase
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import SchedulerSettings
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.scheduling import DrainNode, JoinNode, NodeBeat, SchedulerAnswered
from rollmesh.wire.sockets import Hub, wait

AGENT_TIMEOUT_S = 30.0


def joined(agent: NodeMachine, now_s: float, *, ok: bool = True, error: str = "") -> JoinNode:
    """Answer the agent's join, and return the join."""
    (send,) = agent.step(Ticked(), now_s)
    assert isinstance(send.message, JoinNode)
    answer = SchedulerAnswered(send.message.key, ok, error)
    assert agent.step(Received(SCHEDULER, answer), now_s) == []
    return send.message


def test_a_join_is_resent_with_its_key_until_it_is_answered() -> None:
    agent = NodeMachine("a", 4, ("h200",))
    messages = [send.message for at in range(5) for send in agent.step(Ticked(), at * BEAT_S / 2)]
    assert len(messages) == 3
    assert len(set(messages)) == 1
    join = messages[0]
    assert isinstance(join, JoinNode)
    assert (join.name, join.num_gpus, join.labels, join.beats) == ("a", 4, ("h200",), True)


def test_a_joined_agent_beats_each_second() -> None:
    agent = NodeMachine("a", 4)
    joined(agent, 0.0)
    assert agent.phase is AgentPhase.JOINED
    times = [at / 4 for at in range(1, 4 * int(REJOIN_S))]
    messages = [(at, send.message) for at in times for send in agent.step(Ticked(), at)]
    assert messages == [(float(at), NodeBeat("a")) for at in range(1, int(REJOIN_S))]


def test_a_scheduler_that_lost_its_journal_receives_the_node_again() -> None:
    agent = NodeMachine("a", 4)
    join = joined(agent, 0.0)
    messages = [send.message for send in agent.step(Ticked(), REJOIN_S)]
    assert messages == [NodeBeat("a"), join]


def test_an_answer_to_another_agent_is_ignored() -> None:
    agent = NodeMachine("a", 4)
    agent.step(Ticked(), 0.0)
    agent.step(Received(SCHEDULER, SchedulerAnswered("other", False, "no")), 0.1)
    assert agent.phase is AgentPhase.JOINING


def test_a_refused_agent_sends_nothing_more() -> None:
    agent = NodeMachine("a", 4)
    joined(agent, 0.0, ok=False, error="a has 8 GPUs")
    assert (agent.phase, agent.why) == (AgentPhase.REFUSED, "a has 8 GPUs")
    assert agent.step(Ticked(), 99.0) == []


def run_both(scheduler: FleetScheduler, agent: NodeMachine, from_s: float, to_s: float) -> None:
    """Run the scheduler and the agent for that time, with the messages between them."""
    for now_s in (from_s + step * BEAT_S for step in range(int((to_s - from_s) / BEAT_S))):
        for send in agent.step(Ticked(), now_s):
            for action in scheduler.step(Received(b"node", send.message), now_s):
                if isinstance(action, Send):
                    agent.step(Received(SCHEDULER, action.message), now_s)
        scheduler.step(Ticked(), now_s)


def test_a_drained_node_stays_drained_until_its_agent_restarts() -> None:
    settings = SchedulerSettings(memory_s=30.0)
    scheduler = FleetScheduler(settings, make_policy("fair"))
    agent = NodeMachine("a", 4)
    run_both(scheduler, agent, 0.0, 5.0)
    scheduler.step(Received(b"cli", DrainNode("d", "a")), 5.0)
    run_both(scheduler, agent, 6.0, 6.0 + 3 * settings.memory_s)
    node = scheduler.state.fleet.nodes["a"]
    assert node.phase is NodePhase.DRAINING
    run_both(scheduler, NodeMachine("a", 4), 100.0, 105.0)
    assert (node.name, node.gpus) == ("a", (0, 1, 2, 3))
    assert scheduler.state.fleet.nodes["a"].phase is NodePhase.UP


def test_a_node_is_down_while_its_agent_is_silent_and_then_keeps_its_gpus() -> None:
    settings = SchedulerSettings()
    scheduler = FleetScheduler(settings, make_policy("fair"))
    agent = NodeMachine("a", 4)
    run_both(scheduler, agent, 0.0, 5.0)
    run_both(scheduler, NodeMachine("b", 2), 5.0, 6.0 + settings.node_grace_s)
    phases = {node.name: node.phase for node in scheduler.state.fleet.nodes.values()}
    assert phases == {"a": NodePhase.DOWN, "b": NodePhase.UP}
    run_both(scheduler, agent, 25.0, 26.0)
    assert scheduler.state.fleet.nodes["a"].phase is NodePhase.UP
    assert scheduler.state.fleet.nodes["a"].gpus == (0, 1, 2, 3)


def test_a_silent_scheduler_is_logged_once_until_it_answers_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silence = SilenceWarning("tcp://there:1")
    for num_answers, now_s in ((0, 0.0), (0, SILENT_S), (0, 9 * SILENT_S)):
        silence.look(num_answers, now_s)
    assert sum("scheduler.unheard" in line for line in caplog.messages) == 1
    for num_answers, now_s in ((1, 200.0), (1, 200.0 + SILENT_S / 2), (2, 220.0), (2, 230.0)):
        silence.look(num_answers, now_s)
    assert sum("scheduler.unheard" in line for line in caplog.messages) == 1
    silence.look(2, 220.0 + SILENT_S)
    assert sum("scheduler.unheard" in line for line in caplog.messages) == 2


class AnsweringScheduler(threading.Thread):
    """A scheduler that answers each join with an error, or with success for ''."""

    def __init__(self, answer: str) -> None:
        super().__init__(daemon=True)
        self.hub = Hub("tcp://127.0.0.1:0")
        self.beaten = threading.Event()
        self._answer = answer

    def run(self) -> None:
        while not self.beaten.is_set():
            wait([self.hub], None, 0.1)
            for route, packet in self.hub.receive():
                if isinstance(packet.message, NodeBeat):
                    self.beaten.set()
                elif isinstance(packet.message, JoinNode):
                    key, error = packet.message.key, self._answer
                    self.hub.send(route, Packet(SchedulerAnswered(key, not error, error)))
                    if error:
                        return


def test_an_agent_joins_and_beats_over_a_socket_until_it_is_stopped() -> None:
    scheduler, stop = AnsweringScheduler(""), threading.Event()
    scheduler.start()
    agent = NodeMachine("a", 4)
    serving = threading.Thread(target=serve, args=(scheduler.hub.address, agent, stop))
    serving.start()
    assert scheduler.beaten.wait(AGENT_TIMEOUT_S)
    stop.set()
    serving.join(AGENT_TIMEOUT_S)
    scheduler.join(AGENT_TIMEOUT_S)
    scheduler.hub.close()
    assert agent.phase is AgentPhase.JOINED
    assert not serving.is_alive()


def test_a_refusal_over_a_socket_ends_the_agent_with_the_reason() -> None:
    scheduler = AnsweringScheduler("a: it has 8 GPUs, and had 4")
    scheduler.start()
    with pytest.raises(UserError, match="it has 8 GPUs"):
        serve(scheduler.hub.address, NodeMachine("a", 8), threading.Event())
    scheduler.join(AGENT_TIMEOUT_S)
    scheduler.hub.close()


def test_another_machine_is_not_dialled_without_keys() -> None:
    with pytest.raises(AddressError, match="need keys"):
        serve("tcp://10.0.0.1:7070", NodeMachine("a", 4), threading.Event())


def test_gpus_are_those_that_cuda_can_see() -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,3, 5"}) == 3
    listed = "GPU 0: H200 (UUID: x)\n  MIG 1g.18gb\nGPU 1: H200 (UUID: y)\n"
    assert num_gpus({}, lambda: listed) == 2


def test_gpus_after_an_invalid_number_are_hidden() -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,3"}) == 1


@pytest.mark.parametrize(
    "environment", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {}]
)
def test_a_machine_without_gpus_is_asked_for_their_number(environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match="--gpus N"):
        num_gpus(environment, lambda: "")


SERVICE_TIMEOUT_S = 60.0
SERVES = """
import json, os, signal, sys
ready = {"role": "scheduler", "pid": os.getpid(), "address": os.getcwd(), "http_address": ""}
with os.fdopen(int(sys.argv[-1]), "w") as pipe:
    print(json.dumps(ready), file=pipe)
signal.pause()
"""
"""Reports its working directory as its address, which the tests read."""
ENDS = """
import pathlib, sys
tries = pathlib.Path("tries")
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) < 3:
    sys.exit("rollmesh: the address is taken")
"""


class Callback:
    """The supervisor's callback, which records its calls and raises `fault`."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.fault: Exception | None = None
        self.called = threading.Event()
        self.pid: Callable[[], int] = lambda: 0
        self.pids: list[int] = []

    def __call__(self, address: str) -> None:
        self.addresses.append(address)
        self.pids.append(self.pid())
        self.called.set()
        if self.fault:
            raise self.fault

    def wait(self) -> None:
        """Wait for the next call."""
        self.called.clear()
        assert self.called.wait(SERVICE_TIMEOUT_S)


@contextmanager
def supervised(program: str, folder: Path, callback: Callback) -> Iterator[ServiceSupervisor]:
    supervisor = ServiceSupervisor([sys.executable, "-c", program], folder, callback, check_s=0.05)
    callback.pid = lambda: supervisor.ready.pid if supervisor.ready else 0
    stop = threading.Event()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    try:
        yield supervisor
    finally:
        stop.set()
        thread.join(SERVICE_TIMEOUT_S)
    assert not thread.is_alive()


def test_a_killed_process_is_restarted_in_its_folder(tmp_path: Path) -> None:
    callback = Callback()
    with supervised(SERVES, tmp_path, callback) as supervisor:
        assert supervisor.serves.wait(SERVICE_TIMEOUT_S)
        callback.wait()
        first = callback.pids[-1]
        os.kill(first, signal.SIGKILL)
        while callback.pids[-1] in (0, first):
            callback.wait()
    assert set(callback.addresses) == {str(tmp_path)}
    with pytest.raises(ProcessLookupError):
        os.kill(callback.pids[-1], 0)  # it ends with its supervisor


def test_a_fault_of_the_callback_is_one_warning_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Callback()
    callback.fault = RuntimeError("ray.nodes() failed\nsecond line")
    with supervised(SERVES, tmp_path, callback) as supervisor:
        for _ in range(3):
            callback.wait()
        first = callback.pids[-1]
        os.kill(first, signal.SIGKILL)
        while callback.pids[-1] in (0, first):
            callback.wait()
        assert supervisor.last_line == ""
        callback.fault = None
        callback.wait()
        callback.wait()
        callback.fault = OSError("another")
        callback.wait()
        callback.wait()
    result = [line for line in caplog.messages if "supervisor.failed" in line]
    assert [("RuntimeError" in line, "OSError" in line) for line in result] == [
        (True, False),
        (False, True),
    ]


def test_a_service_that_fails_to_start_reports_why_and_is_restarted(tmp_path: Path) -> None:
    callback = Callback()
    with supervised(ENDS + SERVES, tmp_path, callback) as supervisor:
        assert supervisor.serves.wait(SERVICE_TIMEOUT_S)
        assert supervisor.last_line == "rollmesh: the address is taken"
        callback.wait()
    assert (tmp_path / "tries").read_text() == "xxx"


def test_a_missing_program_ends_nothing(tmp_path: Path) -> None:
    callback = Callback()
    folder = tmp_path / "comes late"
    with supervised(SERVES, folder, callback):
        folder.mkdir()
        callback.wait()
    assert set(callback.addresses) == {str(folder)}
