"""`rollmesh init` writes a mesh.toml that `up` accepts, or names what is missing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from rollmesh.cli.init import BASIC_KEYS, commented_toml, docstrings, main
from rollmesh.cli.main import main as rollmesh
from rollmesh.core.config import Config, load_config
from rollmesh.core.errors import UserError
from rollmesh.launch.checks import check_model

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
    assert main(["--model", "model", "--env", "my_env:MyEnv", "--engine", "http://h:1"]) == 0
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
    assert main([]) == 0
    told = capsys.readouterr().out
    assert told.startswith("wrote mesh.toml; before `rollmesh up mesh.toml`, edit it:\n")
    assert "  model.path: a model folder" in told
    assert "  env: " in told
    assert rollmesh(["up", "mesh.toml"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("rollmesh: model.path is not set; name a model folder")
    assert all("`rollmesh make-model tiny-model`" in each for each in (told, refused))


@pytest.mark.usefixtures("project")
def test_settings_that_the_environment_needs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "model", "--env", "my_env:NeedsPath"]) == 0
    assert "  env_settings.path: an argument of my_env:NeedsPath" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "modell"], "--model modell: no such folder"),
        (["--model", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B"),
        (["--model", "model", "--env", "my_env:MyEnvv"], "MyEnvv; did you mean 'MyEnv'"),
        (["--model", "model", "--env", "gues"], "did you mean 'guess'?"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    project: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "cache"))
    with pytest.raises(UserError) as error:
        main(words)
    assert told in str(error.value)
    assert not (project / "mesh.toml").exists()


def test_all_settings_read_back_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    assert main(["--all", str(path)]) == 0
    assert load_config(path) == Config()


def test_the_basic_settings_are_there_and_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    assert main([str(path)]) == 0
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
    assert docs["RunConfig.folder"] == "# Where run folders stand.\n"
    assert docs["ModelConfig.renderer"].count("\n# ") == 1


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        main([str(path)])
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/mesh\.toml: No such file or directory"):
        main([str(tmp_path / "none" / "mesh.toml")])
