"""Model folders: both layouts of the files, and one clear line for a folder that is not one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollmesh.core.errors import ModelError
from rollmesh.engine.embedded.checkpoint import (
    RopeScaling,
    read_architecture,
    read_weights,
    rotary_frequencies,
)
from rollmesh.engine.embedded.model import Model
from tests.unit.engine.embedded.tiny_models import EOS, tiny_config, tiny_weights, write_model


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3", **changes)))
    return folder


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not run by the embedded engine"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic'"),
        ({"vocab_size": None}, "not a complete qwen3 config"),
    ],
)
def test_an_unsupported_model_is_refused_in_one_line_that_names_the_file(
    tmp_path: Path, changes: dict[str, object], error_text: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read_architecture(write_config(tmp_path, **changes))
    line = str(refused.value)
    assert error_text in line
    assert str(tmp_path / "config.json") in line
    assert "\n" not in line


def test_a_folder_that_is_no_model_is_refused_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not a model folder: config\.json: no such file"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{nope")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_architecture(tmp_path)
    write_config(tmp_path)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        Model(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        Model(tmp_path, torch.float32)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match="do not fit its config"):
        Model(tmp_path, torch.float32)
    write_config(tmp_path, vocab_size=100)
    with pytest.raises(ModelError, match=r"embed_tokens of shape \(96, 32\) does not fit"):
        Model(tmp_path, torch.float32)
    write_config(tmp_path, num_attention_heads=2)
    with pytest.raises(ModelError, match="layer 0's q, k and v of shape"):
        Model(tmp_path, torch.float32)


def test_weights_alone_are_enough_where_the_architecture_is_known(
    tmp_path: Path, model: Model
) -> None:
    (write_model(tmp_path) / "config.json").unlink()
    assert Model(tmp_path, torch.float32, model.architecture).architecture == model.architecture


def test_sharded_weights_equal_those_in_one_file(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole")
    sharded = write_config(tmp_path)
    weights = tiny_weights(tiny_config("qwen3"), seed=0)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: weights[name] for name in members}, sharded / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = read_weights(sharded, torch.float32)
    expected = read_weights(whole, torch.float32)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert read_architecture(tmp_path).eos_token_ids == (EOS,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, EOS]}))
    assert read_architecture(tmp_path).eos_token_ids == (3, EOS)


def test_rope_is_read_from_the_old_and_the_new_layout(tmp_path: Path) -> None:
    old = write_config(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    expected = RopeScaling(kind="linear", theta=5e5, factor=4.0)
    assert read_architecture(old).rope == expected
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert read_architecture(write_config(tmp_path, rope_parameters=new)).rope == expected


def test_llama3_scaling_keeps_high_frequencies_and_stretches_low_ones() -> None:
    plain = rotary_frequencies(RopeScaling(theta=5e5), head_dim=64)
    scaled = rotary_frequencies(
        RopeScaling(kind="llama3", theta=5e5, factor=8.0, original_context=8192), head_dim=64
    )
    assert torch.equal(scaled[:8], plain[:8])
    assert torch.allclose(scaled[-4:], plain[-4:] / 8)
    assert bool((scaled <= plain).all())
