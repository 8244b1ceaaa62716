"""LoRA adapters: reading PEFT folders, mixing them in a step, and the registry."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.core.errors import EngineRefused, ModelError
from rollmesh.engine.embedded.model import Adapter, AdapterRegistry, Model
from rollmesh.engine.embedded.peft import read_adapter
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt
from tests.unit.engine.embedded.tiny_adapters import (
    TARGETS,
    write_adapter,
    write_adapter_config,
    write_merged,
)
from tests.unit.engine.embedded.tiny_models import write_model

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("adapters")
    return [write_adapter(place / f"a{seed}", folder, seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def adapters(folders: list[Path], model: Model) -> list[Adapter]:
    return [read_adapter(each.name, each, model) for each in folders]


@pytest.fixture(scope="module")
def merged(
    folders: list[Path], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Model]:
    place = tmp_path_factory.mktemp("merged")
    return [
        Model(write_merged(place / each.name, folder, each, "qwen3", 0), torch.float32)
        for each in folders
    ]


def test_requests_of_several_adapters_and_of_none_share_each_step(
    model: Model, adapters: list[Adapter], merged: list[Model]
) -> None:
    prompt = random_prompt(40)
    owners = [None, *adapters, adapters[0], None]
    requests = [
        ask(prompt[: 40 - at], f"r{at}", new=12, seed=at, adapter=adapter)
        for at, adapter in enumerate(owners)
    ]
    engine = make_engine(model, max_step_tokens=64)
    finish_all(engine, *requests)
    for at, (request, whole) in enumerate(
        zip(requests, [model, *merged, merged[0], model], strict=True)
    ):
        alone = ask(prompt[: 40 - at], "alone", new=12, seed=at)
        finish_all(make_engine(whole), alone)
        assert output(request) == output(alone)
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_adapters_share_no_prefixes(
    model: Model, adapters: list[Adapter], merged: list[Model]
) -> None:
    prompt = random_prompt(30)
    engine = make_engine(model)
    for adapter in [None, *adapters]:
        finish_all(engine, ask(prompt, "first", new=1, adapter=adapter, extra_key="7"))
    again = ask(prompt, "again", new=6, adapter=adapters[1], extra_key="7")
    finish_all(engine, again)
    alone = ask(prompt, "alone", new=6)
    finish_all(make_engine(merged[1]), alone)
    assert again.num_cached == 29
    assert again.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_forgotten_adapter_stays_with_its_requests(model: Model, adapters: list[Adapter]) -> None:
    registry = AdapterRegistry()
    registry.put(adapters[0])
    request = ask(random_prompt(20), new=8, adapter=registry.find("a1"))
    engine = make_engine(model)
    engine.submit(request)
    engine.step()
    registry.forget("a1")
    while engine.has_work:
        engine.step()
    undisturbed = ask(random_prompt(20), new=8, adapter=adapters[0])
    finish_all(make_engine(model), undisturbed)
    assert output(request) == output(undisturbed)
    with pytest.raises(EngineRefused, match=r"never been loaded: a1\. All loaded adapters: \[\]"):
        registry.find("a1")


def test_a_name_is_taken_until_its_adapter_is_forgotten(adapters: list[Adapter]) -> None:
    registry = AdapterRegistry()
    registry.put(adapters[0])
    with pytest.raises(EngineRefused, match="a1 is loaded already"):
        registry.put(adapters[0])
    registry.forget("a1")
    registry.put(adapters[0])
    assert registry.folders() == {"a1": adapters[0].folder}


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
    ("changes", "error_text"),
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
    tmp_path: Path, folder: Path, model: Model, changes: dict[str, Any], error_text: str
) -> None:
    write_adapter(tmp_path, folder)
    write_adapter_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=error_text) as caught:
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
