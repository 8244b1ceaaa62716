"""The controller's thread: if it cannot continue, every waiting caller gets an error."""

import os
from collections.abc import Sequence

import pytest

from rollmesh.core.errors import RankError
from rollmesh.trainer.controller.hub import RankHub
from rollmesh.trainer.controller.rank_group import NO_STEP, RankGroupSettings
from rollmesh.trainer.controller.spec import RankSpec, Topology

WAIT_S = 60.0


def nowhere(address: str) -> Sequence[RankSpec]:
    """A rank whose output has no destination."""
    spec = RankSpec(
        controller=address, rank=0, topology=Topology(1), roles={}, folder="/proc/nowhere"
    )
    return [spec]


def test_a_failed_thread_fails_current_and_later_callers() -> None:
    hub = RankHub("tcp://127.0.0.1:0", None, RankGroupSettings(), nowhere)
    early = hub.call("actor", "train", NO_STEP, (b"",))
    hub.start()
    with pytest.raises(RankError, match=r"the controller's own thread failed: .*/proc/nowhere"):
        hub.formed.result(WAIT_S)
    with pytest.raises(RankError, match="own thread failed"):
        early.result(WAIT_S)
    with pytest.raises(RankError, match="own thread failed"):
        hub.call("actor", "train", NO_STEP, (b"",)).result(WAIT_S)
    assert hub.query_tensors(NO_STEP, b"").result(WAIT_S).missing == (0,), (
        "which is reported, and not raised"
    )
    hub.close("done")


def test_request_to_a_closed_hub_fails_at_once() -> None:
    hub = RankHub("tcp://127.0.0.1:0", None, RankGroupSettings(), nowhere)
    early = hub.call("actor", "train", NO_STEP, (b"",))
    for reason in ("the first", "the second"):
        hub.close(reason)
    for call in (early, hub.call("actor", "train", NO_STEP, (b"",))):
        with pytest.raises(RankError, match="the first"):
            call.result(0)
    assert hub.query_tensors(NO_STEP, b"").result(0).missing == (0,)
    with pytest.raises(RankError, match="the first"):
        hub.start()


def test_a_closed_hub_writes_to_no_reused_descriptor() -> None:
    hub = RankHub("tcp://127.0.0.1:0", None, RankGroupSettings(), nowhere)
    hub.close("done")
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(64)]
    hub.call("actor", "train", NO_STEP, (b"",))
    for fd in others:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        os.close(fd)
