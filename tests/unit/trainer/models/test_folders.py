"""Model folders are complete whenever they exist, and refused in one line if they cannot be read.

The safetensors library reads their files, whichever rank wrote which part.
"""

import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.core.errors import ModelError
from rollmesh.trainer.models.folders import (
    DTYPE_NAMES,
    FolderLayout,
    TensorSpec,
    load_model,
    num_parameters_in,
    plan_layout,
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


def test_newer_folder_replaces_the_older_without_leftovers(
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


def test_given_weights_are_the_ones_written(tiny_folder: Path, tmp_path: Path) -> None:
    model = load_model(tiny_folder)
    state = {name: value.detach() * 2 for name, value in model.named_parameters()}
    save_model(model, tiny_folder, tmp_path / "twice", state)
    for name, value in load_model(tmp_path / "twice").named_parameters():
        assert value.equal(state[name])


def test_config_names_the_class_that_engines_need(tiny_folder: Path, tmp_path: Path) -> None:
    model = load_model(tiny_folder)
    model.config.architectures = None
    write_config_files(model, tiny_folder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32", "as the weights are held"
    assert (tmp_path / "tokenizer.json").is_file()


def test_parameters_are_counted_without_reading_the_weights(tiny_folder: Path) -> None:
    parameters = load_model(tiny_folder).parameters()
    assert num_parameters_in(tiny_folder) == sum(each.numel() for each in parameters)
    assert num_parameters_in(tiny_folder / "nowhere") == 0


wholes = st.lists(
    st.builds(
        TensorSpec,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter("__metadata__".__ne__),
        st.sampled_from(list(DTYPE_NAMES)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=8,
    unique_by=lambda each: each.name,
)


def fill(folder: Path, layout: FolderLayout, tensors: dict[str, torch.Tensor]) -> None:
    """Write the headers, and each tensor at its place."""
    for name, head in layout.heads.items():
        (folder / name).write_bytes(head)
    for name, spot in sorted(layout.spots.items(), key=lambda pair: pair[1]):
        with (folder / spot.file_name).open("r+b") as file:
            file.seek(spot.offset)
            file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())


@given(wholes, st.integers(1, 200))
def test_rows_written_in_place_are_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, members: list[TensorSpec], max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    noise = {
        each.name: torch.randint(0, 2, (each.num_bytes,), dtype=torch.uint8) for each in members
    }
    layout = plan_layout(members, "model", max_bytes)
    fill(folder, layout, noise)
    found: dict[str, torch.Tensor] = {}
    for name in layout.heads:
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    assert found.keys() == noise.keys()
    for each in members:
        tensor = found[each.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (each.dtype, each.shape)
        assert tensor.reshape(-1).view(torch.uint8).equal(noise[each.name])
        assert layout.spots[each.name].offset % each.dtype.itemsize == 0


@given(wholes, st.integers(1, 200))
def test_weights_are_split_into_shards_and_the_index_names_each(
    members: list[TensorSpec], max_bytes: int
) -> None:
    layout = plan_layout(members, "model", max_bytes)
    inside: dict[str, list[int]] = {name: [] for name in layout.heads}
    for each in members:
        inside[layout.spots[each.name].file_name].append(each.num_bytes)
    assert all(
        sum(sizes) <= max_bytes or len([s for s in sizes if s]) == 1 for sizes in inside.values()
    )
    if len(inside) == 1:
        assert (list(inside), layout.table) == (["model.safetensors"], b"")
    else:
        assert min(inside) == f"model-00001-of-{len(inside):05d}.safetensors"
        table = msgspec.json.decode(layout.table)
        assert table["weight_map"] == {name: spot.file_name for name, spot in layout.spots.items()}
        assert table["metadata"]["total_size"] == sum(map(sum, inside.values()))


def test_layout_depends_only_on_names_and_shapes() -> None:
    members = [TensorSpec("a", torch.bfloat16, (2,)), TensorSpec("b", torch.float64, (3, 1))]
    layout = plan_layout(members, "model")
    assert layout == plan_layout(members, "model")
    assert layout.spots["b"].offset < layout.spots["a"].offset, "wide elements come first"
    assert math.prod(members[1].shape) * 8 == members[1].num_bytes
