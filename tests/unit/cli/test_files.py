"""Verbs that write files: mesh.toml is valid, keys are private, nothing is overwritten unasked."""

import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import orjson
import pytest

from rollmesh.cli.files import BASIC_KEYS, commented_toml, docstrings, init
from rollmesh.cli.main import main
from rollmesh.cli.main import main as rollmesh
from rollmesh.core.config import Config, load_config
from rollmesh.core.config_section import Section
from rollmesh.core.errors import UserError
from rollmesh.core.model_folders import why_no_model
from rollmesh.core.process import USAGE
from rollmesh.core.secret_files import admin_token
from rollmesh.launch.checks import check_model
from rollmesh.wire.keys import Role, read_key_file, read_keys

MY_ENV = """
from rollmesh import SingleTurnEnv, Task

class MyEnv(SingleTurnEnv):
    def tasks(self, split, seed):
        yield Task("t", {"question": "?"})
    def grade(self, task, answer):
        return 1.0

class NeedsPath(MyEnv):
    def __init__(self, path, *, level=1):
        super().__init__()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with a model folder `model` and a module `my_env`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "my_env.py").write_text(MY_ENV)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_bytes(orjson.dumps({"max_position_embeddings": 512}))
    yield tmp_path
    sys.modules.pop("my_env", None)


def test_with_model_and_env_the_file_is_complete(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(["--model", "model", "--env", "my_env:MyEnv", "--engine", "http://h:1"]) == 0
    assert capsys.readouterr().out == "wrote mesh.toml; `rollmesh up mesh.toml` runs it\n"
    config = load_config(project / "mesh.toml")
    assert (config.model.path, config.env) == ("model", "my_env:MyEnv")
    assert config.model.max_context_tokens == 512
    assert config.engine.urls == ("http://h:1",)
    check_model(config.model.path)


@pytest.mark.usefixtures("project")
def test_without_a_model_init_and_up_name_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert init([]) == 0
    output = capsys.readouterr().out
    assert output.startswith("wrote mesh.toml; before `rollmesh up mesh.toml`, edit it:\n")
    assert "  model.path: a model folder" in output
    assert "  env: " in output
    assert rollmesh(["up", "mesh.toml"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("rollmesh: model.path is not set; name a model folder")
    assert all("`rollmesh make-model tiny-model`" in each for each in (output, refused))


@pytest.mark.usefixtures("project")
def test_settings_that_the_environment_needs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert init(["--model", "model", "--env", "my_env:NeedsPath"]) == 0
    assert "  env_settings.path: an argument of my_env:NeedsPath" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--model", "modell"], "--model modell: no such folder"),
        (["--model", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B"),
        (["--model", "model", "--env", "my_env:MyEnvv"], "MyEnvv; did you mean 'MyEnv'"),
        (["--model", "model", "--env", "gues"], "did you mean 'guess'?"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    project: Path, words: list[str], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "cache"))
    with pytest.raises(UserError) as error:
        init(words)
    assert output in str(error.value)
    assert not (project / "mesh.toml").exists()


def test_all_settings_read_back_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    assert init(["--all", str(path)]) == 0
    assert load_config(path) == Config()
    text = path.read_text()
    sections = {"": Config} | {
        name: type(section)
        for name in Config.__struct_fields__
        if isinstance(section := getattr(Config(), name), Section)
    }
    for name, section in sections.items():
        written = text.partition(f"[{name}]\n")[2] if name else text
        written = written.partition("\n[")[0] if name else written
        for key in set(section.__struct_fields__) - sections.keys() - {"env_settings"}:
            assert re.search(rf"(?m)^(# )?{key} (=|is not set)", written), f"{name}.{key}"


def test_the_basic_settings_are_there_and_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    assert init([str(path)]) == 0
    assert load_config(path) == Config()
    text = path.read_text()
    lines = [line.partition(" = ")[0] for line in text.splitlines() if " = " in line]
    named = [key.rpartition(".")[2] for key in BASIC_KEYS if key != "env_settings"]
    assert [line for line in lines if line[0] != "#"] == named
    assert "[env_settings]" in text


def test_every_setting_is_written_below_its_meaning() -> None:
    lines = commented_toml(Config()).splitlines()
    written = {
        line.split(" = ")[0]: lines[at - 1] for at, line in enumerate(lines) if " = " in line
    }
    keys = [
        key
        for name in Config.__struct_fields__
        for key in getattr(getattr(Config(), name), "__struct_fields__", [])
    ]
    assert set(keys) <= written.keys()
    assert all(written[key].startswith("# ") for key in keys)


def test_comments_are_the_docstrings_of_the_source() -> None:
    docs = docstrings()
    assert docs["RunConfig.folder"] == "# The folder of run folders (default: runs).\n"
    assert docs["ModelConfig.renderer"].count("\n# ") == 1


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists; remove it"):
        init([str(path)])
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/mesh\.toml: No such file or directory"):
        init([str(tmp_path / "none" / "mesh.toml")])


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    assert read_keys({"ROLLMESH_KEYS": str(folder)}) is not None


def test_an_existing_key_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.write_text("mine")
    assert main(["keys", str(file)]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_second_start_keeps_the_keys_and_the_token(tmp_path: Path) -> None:
    file, token = tmp_path / "keys.json", tmp_path / "token"
    words = ["keys", "--keep", "--admin-token-file", str(token), str(file)]
    assert main(words) == 0
    hub = file / "hub.json"
    made = hub.read_bytes(), token.read_bytes()
    assert main(words) == 0
    assert (hub.read_bytes(), token.read_bytes()) == made
    environment = {"ROLLMESH_ADMIN_TOKEN_FILE": str(token)}
    assert admin_token(environment) == made[1].decode().strip()


def test_a_file_that_holds_no_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.touch(0o600)
    assert main(["keys", "--keep", str(file)]) == 2
    assert "not a key file" in capsys.readouterr().err


def test_processes_that_start_at_once_share_one_pair_of_keys_and_one_token(tmp_path: Path) -> None:
    num = 4
    barrier = Barrier(num)

    def start(folder: Path) -> tuple[int, bytes, bytes]:
        file, token = folder / "keys.json", folder / "token"
        barrier.wait(30)
        code = main(["keys", "--keep", "--admin-token-file", str(token), str(file)])
        return code, (file / "hub.json").read_bytes(), token.read_bytes()

    with ThreadPoolExecutor(num) as pool:
        for round_ in range(50):
            folder = tmp_path / str(round_)
            folder.mkdir()
            output = list(pool.map(start, [folder] * num))
            assert {code for code, *_ in output} == {0}
            assert len(set(output)) == 1
            assert {each.name for each in folder.iterdir()} == {"keys.json", "token"}


def test_members_are_added_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--keys", str(tmp_path / "keys")]
    assert main(["keys", "add", "worker", "--name", "gpu-7", *words]) == 0
    assert (tmp_path / "keys" / "gpu-7.json").is_file()
    capsys.readouterr()
    assert main(["keys", "list", *words]) == 0
    assert capsys.readouterr().out.split()[:2] == ["gpu-7", "worker"]
    assert main(["keys", "remove", "gpu-7", *words]) == 0
    assert main(["keys", "remove", "gpu-7", *words]) == 2
    assert "no key is named 'gpu-7'" in capsys.readouterr().err


def test_a_members_file_is_exported_without_the_hubs_secret(tmp_path: Path) -> None:
    folder, copy = tmp_path / "keys", tmp_path / "worker.json"
    words = ["keys", "--keep", "--export", f"worker={copy}", str(folder)]
    assert main(words) == 0
    assert main(words) == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    hub = read_key_file(folder)
    assert hub.secret not in copy.read_text()
    assert read_key_file(copy, Role.WORKER).hub_public == hub.public


KEEP = """
import sys
from rollmesh.cli.main import main
assert main(["make-model", "--keep", sys.argv[1]]) == 0
assert "torch" not in sys.modules
"""


def test_an_existing_model_is_kept_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    argv = [sys.executable, "-c", KEEP, str(tmp_path)]
    kept = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert kept.returncode == 0, kept.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_folder_that_cannot_be_created_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["make-model", str(tmp_path / "file" / "model")]) == USAGE
    output = f"rollmesh: {tmp_path}/file/model: Not a directory; name another folder\n"
    assert capsys.readouterr().err == output


def test_an_existing_model_is_not_overwritten_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["make-model", str(tmp_path)]) == USAGE
    output = capsys.readouterr().err
    assert output.startswith(f"rollmesh: {tmp_path}: a model exists; ")
    assert "--force" in output
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("config.json", "mine")
    ]


@pytest.mark.slow
def test_force_overwrites_a_model_and_prints_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["make-model", "--force", str(tmp_path)]) == 0
    assert f"wrote {tmp_path}; " in capsys.readouterr().out
    assert why_no_model(str(tmp_path)) == ""
