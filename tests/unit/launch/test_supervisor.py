"""A worker's exit is reported to the router, and to the next router at its address."""

from rollmesh.core.errors import AddressError
from rollmesh.launch.supervisor import RouterNotifier
from rollmesh.wire.messages import WorkerExited
from rollmesh.wire.sockets import Hub, wait

PATIENCE_S = 60.0
MOMENT_S = 0.5
"""The wait for a message that may have been lost."""


def received(hub: Hub, within_s: float) -> list[object]:
    """Return the messages of the first wake-up."""
    wait([hub], None, within_s)
    return [packet.message for _, packet in hub.receive()]


def bind_again(address: str) -> Hub:
    """Bind again once zmq has released the port."""
    while True:
        try:
            return Hub(address)
        except AddressError:
            continue


def test_exits_reach_the_router_and_its_successor() -> None:
    notifier, hub = RouterNotifier(), Hub("tcp://127.0.0.1:0")
    first = WorkerExited("worker-0", 7, "killed by signal 9")
    notifier.notify(hub.address, first)
    assert received(hub, PATIENCE_S) == [first]
    address = hub.address
    hub.close()
    successor = bind_again(address)
    messages: list[object] = []
    while not messages:  # messages on a dying connection are lost
        notifier.notify(address, WorkerExited("worker-0", 8, "exit code 1"))
        messages = received(successor, MOMENT_S)
    assert messages[0] == WorkerExited("worker-0", 8, "exit code 1")
    successor.close()
    notifier.close()
