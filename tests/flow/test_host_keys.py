"""`rollmesh keys export` writes the secrets of one machine's roles, and no other."""

import re
import shutil
from pathlib import Path

import pytest

from rollmesh.cli.main import main
from rollmesh.core.process import OK, USAGE
from rollmesh.core.secret_files import ENGINE_KEY_VARIABLE
from rollmesh.wire.keys import KEYS_VARIABLE, Role, new_keys, read_key_file, read_members
from rollmesh.wire.sockets import refusal
from tests.flow.worker_mesh import running


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with keys and an engine key; the working directory is beside it."""
    folder = tmp_path / "runs/mesh"
    folder.mkdir(parents=True)
    new_keys(folder / "keys")
    (folder / "keys/engine.key").write_text("engine-secret\n")
    (folder / "keys/engine.key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    return folder


def export(roles: str, *more: str, host: str = "gpu-2") -> int:
    return main(["keys", "export", "--host", host, "--roles", roles, "--run", "runs/mesh", *more])


def secrets_below(folder: Path) -> set[str]:
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    return set(re.findall(r'"secret":\s*"([^"]+)"', text))


@pytest.mark.parametrize(
    ("roles", "files"),
    [
        ("worker", {"worker.json", "engine.key"}),
        ("worker,engine", {"worker.json", "engine.key"}),
        ("publisher,worker", {"publisher.json", "worker.json", "engine.key"}),
        ("engine", {"engine.key"}),
        ("operator", {"operator.json"}),
    ],
)
def test_a_machine_gets_the_keys_of_its_roles_alone(run: Path, roles: str, files: set[str]) -> None:
    before = secrets_below(run)
    assert export(roles) == OK
    out = Path("gpu-2")
    assert {path.name for path in out.iterdir()} == files
    assert out.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}
    found = secrets_below(out)
    assert len(found) == len(files - {"engine.key"})
    assert found.isdisjoint(before)  # neither the hub's nor another member's
    assert secrets_below(run) == before  # and the new ones are in no other place
    names = {each.name for each in read_members(run / "keys")}
    assert {f"gpu-2-{Path(x).stem}" for x in files - {"engine.key"}} <= names


def test_an_exported_folder_is_admitted_until_its_key_is_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert export("worker", "--out", "elsewhere") == OK
    keys = read_key_file(Path("elsewhere"), Role.WORKER)
    monkeypatch.setenv(KEYS_VARIABLE, str(run / "keys"))
    with running(Path.cwd(), "router") as router:
        assert refusal(router.ready.address, keys) == ""
        assert main(["keys", "remove", "gpu-2-worker", "--run", "runs/mesh"]) == OK
        assert refusal(router.ready.address, keys)


def test_the_engine_key_of_the_environment_is_taken_where_the_run_has_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "keys/engine.key").unlink()
    assert export("engine", host="gpu-1") == OK
    assert list(Path("gpu-1").iterdir()) == []
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "from-the-environment")
    assert export("engine") == OK
    assert Path("gpu-2/engine.key").read_text().strip() == "from-the-environment"


def test_a_refused_export_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = read_members(run / "keys")
    assert export("worker,router") == USAGE
    assert "--roles router: choose of" in capsys.readouterr().err
    assert export("worker", host="../x") == USAGE
    assert export("worker") == OK
    assert export("worker") == USAGE
    assert "name another folder by --out" in capsys.readouterr().err
    shutil.rmtree("gpu-2")
    assert export("client,worker") == USAGE  # gpu-2-worker is taken
    assert not Path("gpu-2").exists()
    assert {x.name for x in read_members(run / "keys")} == {
        *(each.name for each in members),
        "gpu-2-worker",
    }
