"""Adapters at work: each request under its own, all in one step, and no prefix shared between."""

from pathlib import Path

import pytest
import torch

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.adapters import Adapter, Shelf
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.peft import read_adapter
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt
from tests.unit.engine.embedded.tiny_adapters import write_adapter, write_merged

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


def test_what_one_adapter_computed_is_not_anothers_prefix(
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


def test_one_that_was_forgotten_stays_with_the_requests_that_have_it(
    model: Model, adapters: list[Adapter]
) -> None:
    shelf = Shelf()
    shelf.put(adapters[0])
    request = ask(random_prompt(20), new=8, adapter=shelf.find("a1"))
    engine = make_engine(model)
    engine.submit(request)
    engine.step()
    shelf.forget("a1")
    while engine.has_work:
        engine.step()
    undisturbed = ask(random_prompt(20), new=8, adapter=adapters[0])
    finish_all(make_engine(model), undisturbed)
    assert output(request) == output(undisturbed)
    with pytest.raises(EngineRefused, match=r"never been loaded: a1\. All loaded adapters: \[\]"):
        shelf.find("a1")


def test_a_name_is_taken_until_its_adapter_is_forgotten(adapters: list[Adapter]) -> None:
    shelf = Shelf()
    shelf.put(adapters[0])
    with pytest.raises(EngineRefused, match="a1 is loaded already"):
        shelf.put(adapters[0])
    shelf.forget("a1")
    shelf.put(adapters[0])
    assert shelf.folders() == {"a1": adapters[0].folder}
