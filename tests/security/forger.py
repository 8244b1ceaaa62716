"""A hostile program, as an agent could start it: it forges the results of a client's groups.

    python forger.py ROUTER SINK RUN_ID NUM_GROUPS

It joins as a worker of its own name and environment, and sends a result with reward 1.0 for each of
the client's groups, which it was not given: in its own name and in an honest worker's, without a
ticket and with a guessed one. It ends when the sink has answered all.
"""

import sys
import time

from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.wire.frames import Packet, encode_record
from rollmesh.wire.messages import GroupFinished, WorkerHello
from rollmesh.wire.sockets import Dialer, wait

PATIENCE_S = 50.0


def main(router_address: str, sink_address: str, run_id: str, num_groups: int) -> None:
    """Send all, and wait for the answers."""
    router = Dialer(router_address, "mallory")
    router.send(Packet(WorkerHello("mallory", "mallory's own", 10_000, 0, "here")))
    sink = Dialer(sink_address, "mallory")
    rollout = RolloutRecord(index=0, outcome=Outcome.COMPLETED, reward=1.0)
    body = encode_record(GroupRecord(task=Task(id="t"), rollouts=[rollout]))
    num_unanswered = 0
    for seq in range(num_groups):
        for name, guess in (("mallory", b""), ("w0", bytes(16))):
            message = GroupFinished(GroupId(run_id, seq), 1, name, True)
            if "ticket" in message.__struct_fields__:
                message = GroupFinished(GroupId(run_id, seq), 1, name, True, guess)
            sink.send(Packet(message, "", body, (b"", b"")))
            num_unanswered += 1
    end_s = time.monotonic() + PATIENCE_S
    while num_unanswered:
        assert time.monotonic() < end_s, f"{num_unanswered} answers are missing"
        wait([sink], None, 0.1)
        num_unanswered -= len(list(sink.receive()))
    sink.close()
    router.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
