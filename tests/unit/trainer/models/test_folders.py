"""Model folders: refused in one line, complete whenever they exist."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.core.errors import ModelError
from rollmesh.trainer.models.folders import (
    load_model,
    num_parameters_in,
    save_model,
    write_config_files,
)


def test_saved_folder_is_what_stock_transformers_loads(tiny_folder: Path, tmp_path: Path) -> None:
    model = load_model(tiny_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    save_model(model, tiny_folder, tmp_path / "weights" / "v1")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "v1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "weights" / "v1")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_newer_folder_takes_the_place_of_the_older_and_leaves_nothing_beside(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    (tmp_path / "checkpoint.part").mkdir()  # what a crash in mid-write left
    model = load_model(tiny_folder)
    save_model(model, tiny_folder, folder)
    (folder / "stray").touch()
    save_model(model, tiny_folder, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert not (folder / "stray").exists()


def test_folder_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in it"):
        load_model(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_folder_without_weights_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_weights_that_are_handed_over_are_the_ones_that_are_written(
    tiny_folder: Path, tmp_path: Path
) -> None:
    model = load_model(tiny_folder)
    state = {name: value.detach() * 2 for name, value in model.named_parameters()}
    save_model(model, tiny_folder, tmp_path / "twice", state)
    for name, value in load_model(tmp_path / "twice").named_parameters():
        assert value.equal(state[name])


def test_a_face_names_the_class_for_engines_whatever_the_source_names(
    tiny_folder: Path, tmp_path: Path
) -> None:
    model = load_model(tiny_folder)
    model.config.architectures = None
    write_config_files(model, tiny_folder, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["architectures"] == ["Qwen3ForCausalLM"]
    assert told["dtype"] == "float32", "as the weights are held"
    assert (tmp_path / "tokenizer.json").is_file()


def test_parameters_are_counted_without_reading_the_weights(tiny_folder: Path) -> None:
    parameters = load_model(tiny_folder).parameters()
    assert num_parameters_in(tiny_folder) == sum(each.numel() for each in parameters)
    assert num_parameters_in(tiny_folder / "nowhere") == 0
