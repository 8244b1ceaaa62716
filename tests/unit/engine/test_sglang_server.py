"""The command, the environment and the output of an SGLang server that rollmesh starts."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from rollmesh.core.config import Config, EngineConfig, RunConfig, TrainerConfig, convert
from rollmesh.core.errors import ConfigError
from rollmesh.engine.sglang_output import LoadProgress, OutputTail
from rollmesh.engine.sglang_server import ServerOrder, server_argv, server_environment

STAMP = "[2026-11-28 14:33:58 TP0] "


def order_of(*args: str, gpus_each: int = 1, lora_rank: int = 0, python: str = "") -> ServerOrder:
    engine = EngineConfig(launch="sglang", gpus_each=gpus_each, args=args, python=python)
    trainer = TrainerConfig(lora_rank=lora_rank)
    config = Config(engine=engine, run=RunConfig(seed=7), trainer=trainer)
    return ServerOrder(config=config, model=Path("/m"), weight_version="3")


def option(argv: tuple[str, ...], name: str) -> str:
    """The value that counts for argparse: the last."""
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


def test_the_server_gets_model_address_version_seed_and_shards() -> None:
    argv = server_argv(order_of(gpus_each=4), "127.0.0.1", 30000)
    assert argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    names = ("--model-path", "--host", "--port", "--weight-version", "--random-seed", "--tp-size")
    assert [option(argv, each) for each in names] == ["/m", "127.0.0.1", "30000", "3", "7", "4"]
    assert "--enable-lora" not in argv


def test_a_server_without_a_gpu_is_one_shard() -> None:
    assert option(server_argv(order_of(gpus_each=0), "h", 1), "--tp-size") == "1"


def test_a_users_options_win_over_the_defaults() -> None:
    argv = server_argv(order_of("--random-seed", "1", "--tp-size", "2"), "h", 1)
    assert (option(argv, "--random-seed"), option(argv, "--tp-size")) == ("1", "2")


def test_an_abbreviated_option_cannot_replace_ours() -> None:
    argv = server_argv(order_of("--model-pat", "/other"), "h", 1)
    assert argv.index("--model-path") > argv.index("--model-pat")


def test_adapters_are_enabled_for_a_run_that_trains_them() -> None:
    argv = server_argv(order_of(lora_rank=16), "h", 1)
    assert option(argv, "--max-lora-rank") == "16"
    assert option(argv, "--lora-target-modules") == "all"


def test_a_key_is_passed_by_file() -> None:
    argv = server_argv(order_of(), "h", 1, "/tmp/key.yaml")
    assert argv[-2:] == ("--config", "/tmp/key.yaml")


@pytest.mark.parametrize(
    ("word", "owner"),
    [
        ("--model-path", "model.path"),
        ("--port=1", "launch"),
        ("--api-key", "ROLLMESH_ENGINE_KEY_FILE"),
        ("--base-gpu-id", "engine.gpus_each"),
        ("--config", "engine.args"),
    ],
)
def test_options_that_rollmesh_sets_are_refused(word: str, owner: str) -> None:
    with pytest.raises(ConfigError, match=f"args: {word.partition('=')[0]} is set by {owner}"):
        convert({"engine": {"launch": "sglang", "args": [word]}}, "mesh.toml")


def test_servers_are_either_started_or_named() -> None:
    tree = {"engine": {"launch": "sglang", "urls": ["http://h:1"]}}
    with pytest.raises(ConfigError, match="urls names running ones"):
        convert(tree, "mesh.toml")


def test_the_environment_has_no_secrets_and_finds_the_programs_beside_its_python() -> None:
    ours = {"ROLLMESH_ENGINE_KEY": "sekrit", "PATH": "/bin", "HOME": "/h"}
    environment = server_environment(ours, "/venv/bin/python", "a/b")
    assert "ROLLMESH_ENGINE_KEY" not in environment
    assert (environment["PATH"], environment["HOME"]) == ("/venv/bin:/bin", "/h")
    assert (environment["ROLLMESH_MARK"], environment["SPT_NOENV"]) == ("a/b", "1")


def test_a_server_on_a_node_of_a_job_sees_its_gpus_of_that_node() -> None:
    ours = {"ROLLMESH_GPU_PLACES": "1", "CUDA_VISIBLE_DEVICES": "4,5"}
    assert server_environment(ours, "python", "a")["CUDA_VISIBLE_DEVICES"] == "5"


def states(lines: Iterable[str]) -> list[str]:
    """The states of a load after each line that changes one."""
    progress = LoadProgress()
    return [str(progress.state) for line in lines if progress.add(line)]


def test_the_progress_of_a_load_is_read_from_its_output() -> None:
    assert states(
        [
            "server_args={'model_path': '/m'}",
            f"{STAMP}Init torch distributed begin.",
            f"{STAMP}Load weight begin. avail mem=78.6 GB",
            "Multi-thread loading shards:   0% Completed | 0/2 [00:00<?, ?it/s]",
            "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.2s/it]",
            "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.2s/it]",
            f"{STAMP}Load weight end. elapsed=2.1 s",
            f"{STAMP}Capture cuda graph begin. This can take up to several minutes.",
            "Capturing batches (bs=160 avail_mem=9.7 GB):   4%| | 1/23 [00:00<00:19]",
            "Application startup complete.",
            "The server is fired up and ready to roll!",
        ]
    ) == [
        "connecting the GPUs",
        "loading weights",
        "loading weights 0/2",
        "loading weights 1/2",
        "allocating KV cache",
        "capturing CUDA graphs",
        "capturing CUDA graphs 1/23",
        "warming up",
        "ready",
    ]


def reason_of(*lines: str) -> tuple[str, bool]:
    tail = OutputTail()
    for line in lines:
        tail.add(line)
    return tail.reason()


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (
            [
                f"{STAMP}Scheduler hit an exception: Traceback (most recent call last):",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                "RuntimeError: Initialization failed.",
            ],
            "torch.OutOfMemoryError: CUDA out of memory.*--mem-fraction-static in engine.args",
        ),
        (
            ["RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."],
            "Not enough memory.*engine.args",
        ),
        (
            ["/venv/bin/python: No module named sglang.launch_server"],
            "no package sglang.*engine.python",
        ),
        (
            ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'torch'"],
            "no package torch.*engine.python",
        ),
        (
            [
                "[2026-11-28 14:33:57] Ignore import error when loading m: No module named 'vllm'",
                "ValueError: Model architectures ['X'] are not supported for now.",
                "EOFError",
            ],
            "^ValueError: Model architectures",
        ),
        (
            [
                "usage: launch_server.py [-h]",
                "launch_server.py: error: unrecognized arguments: --x",
            ],
            "^engine.args: unrecognized arguments: --x$",
        ),
        (["Segmentation fault"], "^Segmentation fault$"),
        ([], "^$"),
    ],
)
def test_the_reason_of_an_end_is_one_line(lines: list[str], wanted: str) -> None:
    text, is_port_taken = reason_of(*lines)
    assert re.search(wanted, text), text
    assert "\n" not in text
    assert not is_port_taken


def test_a_port_that_is_taken_can_be_tried_again() -> None:
    line = "ERROR:    [Errno 98] error while attempting to bind: address already in use"
    assert reason_of(line)[1]


def test_a_signal_is_not_explained_by_what_was_printed_before() -> None:
    tail = OutputTail()
    tail.add("Decode batch, #running-req: 3")
    assert tail.reason(-9).text == ""
    tail.add("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert "illegal memory access" in tail.reason(-9).text


def test_a_long_reason_is_cut() -> None:
    assert len(reason_of("ValueError: " + "x" * 5000)[0]) < 400
