"""Keys: loopback needs none, other addresses do; a mesh accepts its own members only."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.scheduler.service.process import open_hub as open_scheduler_hub
from rollmesh.serve.router.process import open_hub as open_router_hub
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import (
    KEYS_VARIABLE,
    MAKEABLE,
    SCHEDULER_KEYS_VARIABLE,
    Keys,
    Role,
    add_member,
    check_bind,
    check_dial,
    new_keys,
    read_key_file,
    read_keys,
    read_members,
    read_scheduler_keys,
    remove_member,
)
from rollmesh.wire.members import SINK, Access
from rollmesh.wire.messages import ClientHello
from rollmesh.wire.sockets import Dialer, Hub, wait


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "keys.json")


@pytest.fixture
def hub(keys: Keys) -> Iterator[Hub]:
    with closing(Hub("tcp://127.0.0.1:0", keys)) as guarded:
        yield guarded


def clients(hub: Hub, timeout_s: float) -> list[str]:
    wait([hub], None, timeout_s)
    return [p.message.client_id for _, p in hub.receive() if isinstance(p.message, ClientHello)]


def test_peers_with_the_keys_of_the_mesh_are_accepted(hub: Hub, keys: Keys) -> None:
    with closing(Dialer(hub.address, "member", keys)) as member:
        member.send(Packet(ClientHello("member")))
        assert clients(hub, 10.0) == ["member"]


def test_peers_with_other_keys_or_none_are_ignored(hub: Hub, keys: Keys, tmp_path: Path) -> None:
    others = new_keys(tmp_path / "others.json")
    right_hub_wrong_pair = msgspec.structs.replace(others, hub_public=keys.hub_public)
    with (
        closing(Dialer(hub.address, "keyless")) as keyless,
        closing(Dialer(hub.address, "stranger", others)) as stranger,
        closing(Dialer(hub.address, "thief", right_hub_wrong_pair)) as thief,
        closing(Dialer(hub.address, "member", keys)) as member,
    ):
        for dialer, name in ((keyless, "keyless"), (stranger, "stranger"), (thief, "thief")):
            dialer.send(Packet(ClientHello(name)))
        # They dialled before the member did, so their messages would arrive first.
        member.send(Packet(ClientHello("member")))
        assert clients(hub, 10.0) == ["member"]
        assert clients(hub, 0.1) == []


def test_key_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    first = new_keys(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    with pytest.raises(FileExistsError):
        new_keys(folder)
    assert read_keys({KEYS_VARIABLE: str(folder)}) == first
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


def test_a_process_takes_the_file_of_its_role_from_a_folder(tmp_path: Path) -> None:
    hub = new_keys(tmp_path / "keys")
    for role in MAKEABLE:
        keys = read_key_file(tmp_path / "keys", role)
        assert (keys.role, keys.hub_public) == (role, hub.public)
        assert hub.secret not in (tmp_path / "keys" / f"{role}.json").read_text()


def test_a_key_of_another_role_is_refused_in_one_line(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    path = tmp_path / "keys" / "worker.json"
    with pytest.raises(ConfigError, match=f"{path}: it is a key of role worker, and role operator"):
        read_keys({KEYS_VARIABLE: str(path)}, Role.OPERATOR)
    assert read_keys({KEYS_VARIABLE: str(path)}, Role.WORKER)
    with pytest.raises(ConfigError, match=r"role hub is needed; name the folder of hub\.json"):
        read_keys({KEYS_VARIABLE: str(path)}, Role.HUB)


@pytest.mark.parametrize("open_hub", [open_router_hub, open_scheduler_hub])
@pytest.mark.parametrize("name", ["keys", "keys/hub.json"])
def test_a_hub_does_not_start_without_a_readable_list_of_members(
    open_hub: Callable[[str], Hub], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_keys(tmp_path / "keys")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / name))
    members = tmp_path / "keys" / "members.json"
    members.write_text("{}")
    with pytest.raises(ConfigError, match=f"{members}: not a list of members"):
        open_hub("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=f"{members}: not a list of members"):
        Access(read_key_file(tmp_path / "keys", Role.PUBLISHER), SINK)
    members.unlink()
    with pytest.raises(ConfigError, match=f"{members}: no such file .* restore it, or move"):
        open_hub("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=f"{members}: no such file .* restore it, or move"):
        add_member(tmp_path / "keys", Role.WORKER, "gpu-7")


def test_a_publishers_key_serves_as_a_clients(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    keys = read_key_file(tmp_path / "keys" / "publisher.json", Role.CLIENT)
    assert keys.role is Role.PUBLISHER


def test_members_are_added_and_removed_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    new_keys(folder, [])
    path = add_member(folder, Role.WORKER, "gpu-7")
    assert [(each.name, each.role) for each in read_members(folder)] == [("gpu-7", Role.WORKER)]
    assert read_key_file(path).member == read_members(folder)[0]
    with pytest.raises(ConfigError, match="a key of that name"):
        add_member(folder, Role.CLIENT, "gpu-7")
    with pytest.raises(ConfigError, match="--name"):
        add_member(folder, Role.CLIENT, "../hub")
    remove_member(folder, "gpu-7")
    assert read_members(folder) == []
    assert not path.exists()
    with pytest.raises(ConfigError, match="no key is named 'gpu-7'; there are: none"):
        remove_member(folder, "gpu-7")


def test_a_scheduler_may_have_its_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, fleet = new_keys(tmp_path / "mesh"), new_keys(tmp_path / "fleet")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "mesh"))
    assert read_scheduler_keys() == mesh
    monkeypatch.setenv(SCHEDULER_KEYS_VARIABLE, str(tmp_path / "fleet"))
    assert read_scheduler_keys() == fleet
    monkeypatch.setenv(SCHEDULER_KEYS_VARIABLE, "")
    assert read_scheduler_keys() is None


def test_keys_of_a_fleet_are_found_beside_a_token_and_by_this_folders_scheduler_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (KEYS_VARIABLE, SCHEDULER_KEYS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "journal").mkdir()
    fleet = new_keys(tmp_path / "journal" / "keys")
    assert read_scheduler_keys() is None
    assert read_scheduler_keys(token=tmp_path / "journal" / "tokens" / "math") == fleet
    (tmp_path / "scheduler.toml").write_text('journal = "journal"')
    assert read_scheduler_keys() == fleet


def test_no_variable_means_no_keys() -> None:
    assert read_keys({}) is None


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    path = tmp_path / "keys" / "hub.json"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys({KEYS_VARIABLE: str(path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    path = tmp_path / "keys" / "hub.json"
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match=f"{path}: it belongs to uid 65534"):
        read_keys({KEYS_VARIABLE: str(path)})


def test_a_key_file_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_keys({KEYS_VARIABLE: str(path)})


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"hub_public": 1}'])
def test_an_invalid_key_file_is_named(tmp_path: Path, content: bytes | None) -> None:
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
def test_local_addresses_are_dialled_without_keys(address: str) -> None:
    check_dial(address, None)
