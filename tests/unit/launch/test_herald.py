"""What launch tells the router reaches it, and the next router at its address too."""

from rollmesh.core.errors import AddressError
from rollmesh.launch.herald import Herald
from rollmesh.wire.messages import WorkerExited
from rollmesh.wire.sockets import Hub, wait

WITHIN_S = 5.0


def heard(hub: Hub) -> list[object]:
    wait([hub], None, WITHIN_S)
    return [packet.message for _, packet in hub.receive()]


def bind_again(address: str) -> Hub:
    """zmq gives up the port in its own time."""
    while True:
        try:
            return Hub(address)
        except AddressError:
            continue


def test_the_router_hears_of_an_end_and_so_does_its_successor() -> None:
    herald, hub = Herald(), Hub("tcp://127.0.0.1:0")
    first = WorkerExited("worker-0", 7, "killed by signal 9")
    herald.tell(hub.address, first)
    assert heard(hub) == [first]
    address = hub.address
    hub.close()
    second = WorkerExited("worker-0", 8, "exit code 1")
    herald.tell(address, second)
    successor = bind_again(address)
    assert heard(successor) == [second]
    successor.close()
    herald.close()
