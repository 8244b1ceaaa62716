"""An address that only looks like loopback is neither connected to nor bound without keys."""

import os

import pytest

from rollmesh.core.errors import AddressError
from rollmesh.trainer.controller.rendezvous import bind_collectives
from rollmesh.wire.keys import KEYS_VARIABLE, check_bind, check_dial

LOOK_ALIKES = (
    "tcp://127.evil.example:5555",
    "tcp://127.0.0.1.evil.example:5555",
    "tcp://localhost.evil.example:5555",
    "tcp://localhost@10.0.0.1:5555",
    "tcp://127.0.0.1:0;10.0.0.1:5555",
    "tcp://::1.evil.example:5555",
)


@pytest.mark.parametrize("address", LOOK_ALIKES)
def test_a_look_alike_of_loopback_is_not_connected_to_without_keys(address: str) -> None:
    with pytest.raises(AddressError, match=KEYS_VARIABLE):
        check_dial(address, None)


@pytest.mark.parametrize("address", LOOK_ALIKES)
def test_a_look_alike_of_loopback_is_not_bound_without_keys(address: str) -> None:
    with pytest.raises(AddressError, match=KEYS_VARIABLE):
        check_bind(address, None)


def test_collectives_treat_a_look_alike_as_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    bind_collectives("127.evil.example")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
