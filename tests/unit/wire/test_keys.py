"""Keys: loopback needs none, everything else does; a mesh lets in its own peers and nobody else."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, check_bind, check_dial, new_keys, read_keys
from rollmesh.wire.messages import ClientHello
from rollmesh.wire.sockets import Dialer, Hub, wait


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "keys.json")


@pytest.fixture
def hub(keys: Keys) -> Iterator[Hub]:
    with closing(Hub("tcp://127.0.0.1:0", keys)) as guarded:
        yield guarded


def heard(hub: Hub, timeout_s: float) -> list[str]:
    wait([hub], None, timeout_s)
    return [p.message.client_id for _, p in hub.receive() if isinstance(p.message, ClientHello)]


def test_peers_with_the_mesh_keys_are_let_in(hub: Hub, keys: Keys) -> None:
    with closing(Dialer(hub.address, "friend", keys)) as friend:
        friend.send(Packet(ClientHello("friend")))
        assert heard(hub, 10.0) == ["friend"]


def test_peers_with_other_keys_or_none_are_not_heard(hub: Hub, keys: Keys, tmp_path: Path) -> None:
    others = new_keys(tmp_path / "others.json")
    right_hub_wrong_dialer = Keys(keys.hub_public, "", others.dialer_public, others.dialer_secret)
    with (
        closing(Dialer(hub.address, "naked")) as naked,
        closing(Dialer(hub.address, "stranger", others)) as stranger,
        closing(Dialer(hub.address, "thief", right_hub_wrong_dialer)) as thief,
        closing(Dialer(hub.address, "friend", keys)) as friend,
    ):
        for dialer, name in ((naked, "naked"), (stranger, "stranger"), (thief, "thief")):
            dialer.send(Packet(ClientHello(name)))
        # They dialled before the friend did, so they would be heard before it.
        friend.send(Packet(ClientHello("friend")))
        assert heard(hub, 10.0) == ["friend"]
        assert heard(hub, 0.1) == []


def test_a_key_file_is_its_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = new_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        new_keys(path)
    assert read_keys({KEYS_VARIABLE: str(path)}) == first


def test_no_variable_means_no_keys() -> None:
    assert read_keys({}) is None


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    new_keys(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys({KEYS_VARIABLE: str(path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    new_keys(path)
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match=f"{path}: it belongs to uid 65534"):
        read_keys({KEYS_VARIABLE: str(path)})


def test_a_key_file_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys({KEYS_VARIABLE: str(path)})


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"hub_public": 1}'])
def test_what_is_no_key_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE}={path}"):
        read_keys({KEYS_VARIABLE: str(path)})


@pytest.mark.parametrize(
    "bind",
    ["tcp://127.0.0.1:0", "tcp://localhost:5", "tcp://[::1]:5", "ipc:///tmp/x", "inproc://x"],
)
def test_local_addresses_need_no_keys(bind: str) -> None:
    check_bind(bind, None)


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:5", "tcp://10.0.0.1:5", "tcp://[::]:5"]
)
def test_addresses_that_others_reach_need_keys(bind: str, keys: Keys) -> None:
    with pytest.raises(AddressError, match=KEYS_VARIABLE):
        check_bind(bind, None)
    check_bind(bind, keys)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:5", "tcp://router:5555"])
def test_another_machine_is_not_dialled_without_keys(address: str, keys: Keys) -> None:
    with pytest.raises(AddressError, match=KEYS_VARIABLE):
        check_dial(address, None)
    check_dial(address, keys)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5", "ipc:///tmp/x", "nonsense"])
def test_what_is_no_other_machine_needs_no_keys_to_be_dialled(address: str) -> None:
    check_dial(address, None)
