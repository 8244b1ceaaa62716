"""The controller's thread: where it cannot go on, whoever waits is told."""

from collections.abc import Sequence

import pytest

from rollmesh.core.errors import RankError
from rollmesh.trainer.controller.crew import NO_STEP, CrewSettings
from rollmesh.trainer.controller.hub import CrewHub
from rollmesh.trainer.controller.spec import RankSpec
from rollmesh.trainer.controller.topology import Topology

WAIT_S = 20.0


def nowhere(address: str) -> Sequence[RankSpec]:
    """A rank whose output has no place."""
    spec = RankSpec(
        controller=address, rank=0, topology=Topology(1), roles={}, folder="/proc/nowhere"
    )
    return [spec]


def test_a_thread_that_fails_fails_whoever_waits_and_whoever_comes_later() -> None:
    hub = CrewHub("tcp://127.0.0.1:0", None, CrewSettings(), nowhere)
    early = hub.call("actor", "train", NO_STEP, (b"",))
    hub.start()
    with pytest.raises(RankError, match=r"the controller's own thread failed: .*/proc/nowhere"):
        hub.formed.result(WAIT_S)
    with pytest.raises(RankError, match="own thread failed"):
        early.result(WAIT_S)
    with pytest.raises(RankError, match="own thread failed"):
        hub.call("actor", "train", NO_STEP, (b"",)).result(WAIT_S)
    with pytest.raises(RankError, match="own thread failed"):
        hub.ask(NO_STEP, b"").result(WAIT_S)
    hub.close("done")
