"""What launch tells the router reaches it, and the next router at its address."""

from rollmesh.core.errors import AddressError
from rollmesh.launch.herald import Herald
from rollmesh.wire.messages import WorkerExited
from rollmesh.wire.sockets import Hub, wait

PATIENCE_S = 60.0
MOMENT_S = 0.5
"""So long something is listened for that may have been lost."""


def heard(hub: Hub, within_s: float) -> list[object]:
    """What comes first."""
    wait([hub], None, within_s)
    return [packet.message for _, packet in hub.receive()]


def bind_again(address: str) -> Hub:
    """zmq gives up the port in its own time."""
    while True:
        try:
            return Hub(address)
        except AddressError:
            continue


def test_the_router_hears_of_an_end_and_its_successor_of_the_next() -> None:
    herald, hub = Herald(), Hub("tcp://127.0.0.1:0")
    first = WorkerExited("worker-0", 7, "killed by signal 9")
    herald.tell(hub.address, first)
    assert heard(hub, PATIENCE_S) == [first]
    address = hub.address
    hub.close()
    successor = bind_again(address)
    words: list[object] = []
    while not words:  # what is said into a connection that is being lost is lost
        herald.tell(address, WorkerExited("worker-0", 8, "exit code 1"))
        words = heard(successor, MOMENT_S)
    assert words[0] == WorkerExited("worker-0", 8, "exit code 1")
    successor.close()
    herald.close()
