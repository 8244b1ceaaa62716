"""A rank process whose controller is this test, which sends messages that no controller would
send.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from rollmesh.core.process import FAILED
from rollmesh.trainer.controller.answers import encode_values
from rollmesh.trainer.controller.hub import MODULE
from rollmesh.trainer.controller.spec import RankSpec, RoleSpec, Topology, to_argument
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import (
    CallEnded,
    CallStaged,
    FormGroup,
    RankBeat,
    RankHello,
    RankMessage,
    RankReady,
    RunCall,
    StageCall,
)
from rollmesh.wire.sockets import Hub, wait
from tests.flow.rank_group import ROLE, SMALL

WAIT_S = 60.0
SUM = encode_values(((1.0,), {}, None))


class ScriptedRank:
    """A rank process and its message stream."""

    def __init__(self, hub: Hub, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._hub = hub
        self._messages = self._receive()

    def next(self) -> AnyMessage:
        """Return its next message, except heartbeats."""
        return next(self._messages)

    def send(self, message: RankMessage, body: bytes = b"") -> None:
        assert self._hub.send(b"rank-0", Packet(message, body=body))

    def stage(self, call_id: int) -> None:
        """Stage a call, and wait until the rank has all arguments."""
        self.send(StageCall(-1, call_id, "sums", "all_of", -1), SUM)
        assert self.next() == CallStaged(0, call_id)

    def _receive(self) -> Iterator[AnyMessage]:
        while True:
            wait([self._hub], None, WAIT_S)
            for _, packet in self._hub.receive():
                if not isinstance(packet.message, RankBeat):
                    yield packet.message


@contextmanager
def scripted_rank() -> Iterator[ScriptedRank]:
    """A rank that is ready."""
    with closing(Hub("tcp://127.0.0.1:0")) as hub:
        spec = RankSpec(
            controller=hub.address,
            rank=0,
            topology=Topology(1),
            roles={"sums": RoleSpec(make=ROLE)},
            plane=SMALL,
            silence_s=10 * WAIT_S,
        )
        argv = [sys.executable, "-m", MODULE, "--spec", to_argument(spec)]
        with subprocess.Popen(argv) as process:
            try:
                rank = ScriptedRank(hub, process)
                hello = rank.next()
                assert isinstance(hello, RankHello)
                rank.send(FormGroup(-1))
                assert isinstance(rank.next(), RankReady)
                yield rank
            finally:
                process.kill()


def test_a_rank_that_missed_a_run_message_runs_no_later_call() -> None:
    with scripted_rank() as rank:
        for call_id in (1, 2, 3):
            rank.stage(call_id)
        rank.send(RunCall(-1, 1))
        assert rank.next() == CallEnded(0, 1)
        rank.send(
            RunCall(-1, 3)
        )  # 2 was lost: the other ranks run it, and would meet this one in it
        assert rank.process.wait(WAIT_S) == FAILED
