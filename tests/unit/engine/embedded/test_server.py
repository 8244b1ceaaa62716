"""The process's command line."""

import shlex
from pathlib import Path

import pytest

from rollmesh.engine.embedded.engine import EngineLimits
from rollmesh.engine.embedded.server import Settings, main, parse


def test_defaults_are_those_of_the_settings() -> None:
    assert parse(["--model-dir", "m"]) == Settings(model_dir=Path("m"))


def test_options_reach_the_settings() -> None:
    line = """--model-dir m --host 0.0.0.0 --port 7 --weight-version 0 --dtype bfloat16
        --incremental-streaming-output --skip-tokenizer-init --num-threads 2
        --random-seed 5 --max-total-tokens 99 --max-running-requests 3
        --chunked-prefill-size 16 --max-queued-requests 4
        --listen-fd 4 --ready-fd 5 --role engine-1 --run-folder f"""
    assert parse(shlex.split(line)) == Settings(
        model_dir=Path("m"),
        bind="0.0.0.0:7",
        listen_fd=4,
        ready_fd=5,
        role="engine-1",
        run_folder=Path("f"),
        weight_version="0",
        dtype="bfloat16",
        is_incremental=True,
        skips_tokenizer=True,
        num_threads=2,
        seed=5,
        limits=EngineLimits(num_slots=99, max_running=3, max_step_tokens=16, max_queued=4),
    )


def test_a_folder_that_is_no_model_is_one_line_and_exit_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-dir", str(tmp_path)]) == 2
    line = capfd.readouterr().err
    assert line.startswith(f"rollmesh: {tmp_path}: not a model folder")
    assert line.count("\n") == 1


def test_an_address_that_is_taken_is_one_line_and_exit_code_2(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-dir", str(folder), "--host", "256.0.0.1"]) == 2
    assert "rollmesh: 256.0.0.1:0: cannot listen there" in capfd.readouterr().err
