"""Low-rank adapters: only they train, and PEFT and transformers load their folders."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import ModelError
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.lora import SCALE, TARGETS, LoraAdapters
from rollmesh.trainer.models.folders import load_model
from rollmesh.trainer.policy import Policy
from tests.unit.trainer.samples import new_sample

RANK = 4
SETTINGS = TrainerConfig(lora_rank=RANK, learning_rate=0.02, max_logprob_gap=1e9, max_token_gap=1e9)
LAYERS = 7
"""Number of adapted modules in each of the model's two layers: q, k, v, o, gate, up, down."""
Arrays = dict[str, npt.NDArray[np.float32]]


def samples() -> list[Sample]:
    texts = [1, 2, 3, 4, 5, 6], [1, 2, 7, 8]
    return [
        new_sample(ids, [0, 0] + [1] * (len(ids) - 2), index=at, reward=1.0 - at)
        for at, ids in enumerate(texts)
    ]


def trained(folder: Path, num_steps: int = 3, **more: Any) -> Policy:
    policy = Policy(str(folder), msgspec.structs.replace(SETTINGS, **more))
    for step in range(num_steps):
        policy.step(samples(), step)
    return policy


def probed(folder: Path, token_ids: tuple[int, ...]) -> list[float]:
    """Return the log-probs that plain transformers computes from the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    logprobs: list[float] = torch.log_softmax(logits, -1)[range(31), list(token_ids[1:])].tolist()
    return logprobs


def weights_in(folder: Path, name: str = "model") -> Arrays:
    weights: Arrays = load_file(folder / f"{name}.safetensors")
    return weights


def test_adapted_model_begins_unchanged(tiny_folder: Path) -> None:
    adapted, plain = (
        Policy(str(tiny_folder), msgspec.structs.replace(SETTINGS, lora_rank=rank))
        for rank in (RANK, 0)
    )
    assert adapted.probe() == plain.probe()


def test_adapters_train_and_the_weights_do_not_change(tiny_folder: Path, tmp_path: Path) -> None:
    policy = trained(tiny_folder)
    before = Policy(str(tiny_folder), SETTINGS).probe()
    assert policy.probe().logprobs != pytest.approx(before.logprobs, abs=1e-2)
    policy.save(tmp_path / "after")
    after, was = weights_in(tmp_path / "after"), weights_in(tiny_folder)
    assert after.keys() == was.keys()
    moved = {name for name in was if np.abs(after[name] - was[name]).max() > 1e-4}
    assert len(moved) == 2 * LAYERS
    assert all(name.split(".")[-2] in TARGETS for name in moved)
    assert all(np.array_equal(after[name], was[name]) for name in was.keys() - moved)


def test_merged_weights_give_the_logprobs_of_the_adapted_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    policy = trained(tiny_folder)
    policy.save(tmp_path / "checkpoint")
    probe = policy.probe()
    assert probed(tmp_path / "checkpoint", probe.token_ids) == pytest.approx(
        probe.logprobs, abs=1e-5
    )
    assert (tmp_path / "checkpoint" / "tokenizer.json").is_file()


@pytest.mark.parametrize("where", ["v000007", "checkpoint/adapter"])
def test_adapter_folder_applied_by_the_formula_gives_the_adapted_logprobs(
    where: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """The test merges the two files itself, in float64 and by PEFT's names."""
    policy = trained(tiny_folder)
    assert policy.export(tmp_path / "v000007", 7) == ()
    policy.save(tmp_path / "checkpoint")
    folder = tmp_path / where
    config = json.loads((folder / "adapter_config.json").read_text())
    base = weights_in(Path(config["base_model_name_or_path"]))
    adapter = weights_in(folder, "adapter_model")
    assert len(adapter) == 2 * 2 * LAYERS
    merged = weights_in(tmp_path / "checkpoint")
    for name in adapter:
        assert name.startswith("base_model.model.model.layers.")
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            down = adapter[name].astype(np.float64)
            up = adapter[name.replace("lora_A", "lora_B")].astype(np.float64)
            assert (down.shape[0], up.shape[1]) == (RANK, RANK)
            learned = config["lora_alpha"] / config["r"] * up @ down
            assert merged[f"{layer}.weight"] == pytest.approx(
                base[f"{layer}.weight"] + learned, abs=1e-6
            )
            assert layer.split(".")[-1] in config["target_modules"]


def test_adapter_folder_has_exactly_the_files_that_engines_need(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """SGLang refuses a folder that also has added tokens or weights."""
    policy = Policy(str(tiny_folder), SETTINGS)
    policy.export(tmp_path / "v1", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1"]
    names = sorted(path.name for path in (tmp_path / "v1").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"], config["bias"]) == (RANK, SCALE * RANK, "none")
    assert config["target_modules"] == sorted(set(TARGETS) - {"qkv_proj", "gate_up_proj"})
    report = policy.step(samples(), 0)
    assert report.held_policy_version == 1


def test_snapshot_holds_only_adapters_and_restores_them(tiny_folder: Path, tmp_path: Path) -> None:
    policy = trained(tiny_folder)
    policy.snapshot(tmp_path)
    while not policy.is_snapshot_written():
        pass
    probe = policy.probe()
    names = weights_in(tmp_path / "model").keys()
    assert len(names) == 2 * 2 * LAYERS
    assert not (tmp_path / "model" / "config.json").exists()  # transformers would miss the rest
    other = Policy(str(tiny_folder), SETTINGS)
    other.restore(tmp_path)
    assert other.probe() == probe
    reports = [each.step(samples(), 3).grad_norm for each in (policy, other)]
    assert reports[0] == reports[1]
    assert policy.probe() == other.probe()


def test_adapter_initialisation_is_equal_on_all_ranks_and_uses_no_global_rng(
    tiny_folder: Path,
) -> None:
    weights = []
    for seed in (3, 4):
        model = load_model(tiny_folder)
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        LoraAdapters(model, RANK, tiny_folder)
        weights.append(dict(model.named_parameters()))
        assert torch.equal(torch.get_rng_state(), state)
    names = [name for name in weights[0] if name.endswith("lora_A.weight")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in names)
    first, second = (weights[0][name] for name in names[:2])
    assert not torch.equal(first, second)  # yet no two layers alike
    assert {name for name, each in weights[0].items() if each.requires_grad} == {
        name for name in weights[0] if ".lora_" in name
    }


def test_a_model_without_such_layers_is_refused_in_one_line(tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=20, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = OPTForCausalLM(config)
    for layer in model.model.decoder.layers:
        layer.self_attn = torch.nn.Identity()
    with pytest.raises(ModelError, match=r"trainer\.lora_rank = 2 finds no linear layer") as error:
        LoraAdapters(model, 2, tmp_path)
    assert "\n" not in str(error.value)
