"""The layout of tensors in files: safetensors reads it, whichever rank wrote which part."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rollmesh.trainer.models.folders import DTYPE_NAMES, FolderLayout, TensorSpec, plan_layout

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
    """Write the heads, and each tensor where it belongs."""
    for name, head in layout.heads.items():
        (folder / name).write_bytes(head)
    for name, spot in sorted(layout.spots.items(), key=lambda pair: pair[1]):
        with (folder / spot.file_name).open("r+b") as file:
            file.seek(spot.offset)
            file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())


@given(wholes, st.integers(1, 200))
def test_what_is_written_where_it_belongs_is_what_safetensors_reads(
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
        told = found[each.name]
        assert (told.dtype, tuple(told.shape)) == (each.dtype, each.shape)
        assert told.reshape(-1).view(torch.uint8).equal(noise[each.name])
        assert layout.spots[each.name].offset % each.dtype.itemsize == 0


@given(wholes, st.integers(1, 200))
def test_files_are_cut_before_they_are_too_large_and_the_table_names_each(
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


def test_every_rank_that_knows_names_and_shapes_lays_out_alike() -> None:
    members = [TensorSpec("a", torch.bfloat16, (2,)), TensorSpec("b", torch.float64, (3, 1))]
    layout = plan_layout(members, "model")
    assert layout == plan_layout(members, "model")
    assert layout.spots["b"].offset < layout.spots["a"].offset, "wide elements come first"
    assert math.prod(members[1].shape) * 8 == members[1].num_bytes
