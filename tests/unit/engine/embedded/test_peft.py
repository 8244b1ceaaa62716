"""Adapter folders: every family's layers find their place, and what does not is one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.core.errors import ModelError
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.peft import read_adapter
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, random_prompt
from tests.unit.engine.embedded.tiny_adapters import (
    TARGETS,
    write_adapter,
    write_adapter_config,
    write_merged,
)
from tests.unit.engine.embedded.tiny_models import write_model

WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj",), ("k_proj", "up_proj"), ("v_proj",)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_adapted_model_scores_as_the_merged_one(
    tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    base = write_model(tmp_path / "base", family, seed=4)
    adapter = write_adapter(tmp_path / "adapter", base, 9, targets)
    whole = write_merged(tmp_path / "merged", base, adapter, family, 4)
    model = Model(base, torch.float32)
    prompt = random_prompt(50)
    adapted = ask(prompt, new=0, logprob_start=0, adapter=read_adapter("a", adapter, model))
    plain, merged = (ask(prompt, new=0, logprob_start=0) for _ in range(2))
    finish_all(make_engine(model), adapted)
    finish_all(make_engine(Model(whole, torch.float32)), merged)
    finish_all(make_engine(model), plain)
    assert adapted.prompt_logprobs == pytest.approx(merged.prompt_logprobs, abs=1e-4)
    assert adapted.prompt_logprobs != pytest.approx(plain.prompt_logprobs, abs=1e-2)


def test_scale_of_a_stabilised_rank_is_alpha_over_its_root(
    tmp_path: Path, folder: Path, model: Model
) -> None:
    plain = read_adapter("a", write_adapter(tmp_path, folder), model)
    write_adapter_config(tmp_path, use_rslora=True)
    stabilised = read_adapter("a", tmp_path, model)
    first, second = plain.layers[0].down, stabilised.layers[0].down
    assert first
    assert second
    assert torch.equal(first.up * 2, second.up)  # of rank 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' with bias 'none' is not run"),
        ({"bias": "all"}, "with bias 'all' is not run"),
        ({"use_dora": True}, "use_dora is not run"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not run"),
        ({"r": 0}, "r = 0"),
        ({"r": None}, "not a complete adapter"),
    ],
)
def test_settings_that_change_the_formula_are_refused(
    tmp_path: Path, folder: Path, model: Model, changes: dict[str, Any], told: str
) -> None:
    write_adapter(tmp_path, folder)
    write_adapter_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=told) as caught:
        read_adapter("a", tmp_path, model)
    assert str(tmp_path / "adapter_config.json") in str(caught.value)


def test_tensors_without_a_place_are_refused(tmp_path: Path, folder: Path, model: Model) -> None:
    write_adapter(tmp_path, folder)
    tensors = load_file(tmp_path / WEIGHTS)
    half = min(name for name in tensors if "lora_A" in name)
    save_file({name: each for name, each in tensors.items() if name != half}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"lora_B\.weight is not run by the embedded engine"):
        read_adapter("a", tmp_path, model)


def test_tensors_of_another_models_shape_are_refused(tmp_path: Path, model: Model) -> None:
    wide = write_model(tmp_path / "wide", "qwen3", hidden_size=64)
    adapter = write_adapter(tmp_path / "adapter", wide)
    with pytest.raises(ModelError, match="layer 0 does not fit the model"):
        read_adapter("a", adapter, model)


@pytest.mark.parametrize("missing", ["adapter_config.json", WEIGHTS])
def test_folder_that_is_no_adapter_is_one_line(
    tmp_path: Path, folder: Path, model: Model, missing: str
) -> None:
    write_adapter(tmp_path, folder)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing) as caught:
        read_adapter("a", tmp_path, model)
    assert "\n" not in str(caught.value)
