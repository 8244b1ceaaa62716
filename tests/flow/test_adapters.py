"""A run that trains adapters samples with the trained weights and saves a whole model."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.flow.demo import read, start

RANK = 4
EXACT = 1e-3
"""The bound for whole weights: float32 on both sides is within 1e-5."""


@pytest.mark.slow
def test_a_run_of_adapters_samples_what_it_trained_and_leaves_a_whole_model(tmp_path: Path) -> None:
    settings = {"trainer.lora_rank": RANK, "trainer.num_steps": 3, "trainer.learning_rate": 0.02}
    process = start(
        tmp_path, **settings, **{"trainer.max_staleness": 0}
    )  # float32, so that log-probs are exact
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    run = tmp_path / "runs" / "demo"
    summary = read(run / "summary.json")
    assert (summary["num_steps"], summary["num_lost"]) == (3, 0)
    assert all(row["max_gap"] < EXACT for row in summary["exactness"])
    steps = [
        msgspec.json.decode(each) for each in (run / "metrics.jsonl").read_bytes().splitlines()
    ]
    rows = [row for step in steps for row in step.get("exactness", ())]
    assert [(row["kind"], row["policy_version"]) for row in rows] == [
        ("exact", policy_version) for policy_version in (1, 2, 3)
    ]
    published = sorted((run / "weights").iterdir())
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert all(sorted(path.name for path in each.iterdir()) == files for each in published)
    base = load_file(run / "model" / "model.safetensors")
    merged = load_file(run / "checkpoint" / "model.safetensors")
    adapter = load_file(run / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    name = "model.layers.0.self_attn.q_proj"
    up, down = (adapter[f"base_model.model.{name}.lora_{each}.weight"] for each in "BA")
    learned = merged[f"{name}.weight"] - base[f"{name}.weight"]
    assert learned.abs().max() > 1e-4
    assert torch.allclose(learned, 2 * up @ down, atol=1e-6)
