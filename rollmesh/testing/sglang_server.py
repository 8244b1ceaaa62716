"""A stand-in for SGLang's launcher: the embedded engine behind SGLang's command line.

    engine.python = write_sglang_python(folder)     # then engine.launch = "sglang" starts this

- It prints the lines by which a load is followed, and starts a further process, as SGLang does,
  that ignores SIGTERM.
- `--fail TEXT` prints TEXT and ends with exit code 1, while it loads.
- Options of SGLang that the embedded engine does not have are ignored.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

_SCHEDULER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
_PROGRESS = (
    "Init torch distributed begin.",
    "Load weight begin. avail mem=1.00 GB",
    "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 9.99it/s]",
    "Load weight end. elapsed=0.01 s",
)


def write_sglang_python(folder: Path) -> Path:
    """Write a program that takes the place of a Python with SGLang; return its path."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {__name__} "$@"\n')
    program.chmod(0o755)
    return program


def main(argv: list[str]) -> int:
    """Run `python -m sglang.launch_server ARGS` as the embedded engine; `-c CODE` does nothing."""
    if argv[:1] == ["-c"]:
        return 0
    if argv[:2] != ["-m", "sglang.launch_server"]:
        raise SystemExit(f"unexpected arguments: {argv}")
    options, rest = _parser().parse_known_args(argv[2:])
    subprocess.Popen([sys.executable, "-c", _SCHEDULER])
    sys.stdout.writelines(f"[2026-01-01 00:00:00 TP0] {line}\n" for line in _PROGRESS)
    if options.fail:
        sys.stdout.write(f"{options.fail}\n")
        return 1
    sys.stdout.flush()
    from rollmesh.engine.embedded.server import main as serve  # noqa: PLC0415 - imports torch

    if options.config:
        rest += ["--api-key", _key_in(options.config)]
    words = ["--model-dir", options.model_path, "--host", options.host, "--port", options.port]
    words += ["--weight-version", options.weight_version, "--random-seed", options.random_seed]
    words += ["--incremental-streaming-output"] * options.incremental_streaming_output
    return serve([*words, *rest])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    for name in ("--model-path", "--host", "--port", "--weight-version", "--random-seed"):
        parser.add_argument(name, required=True)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    for name in ("--config", "--fail", "--tp-size", "--log-level-http", "--mem-fraction-static"):
        parser.add_argument(name, default="")
    return parser


def _key_in(path: str) -> str:
    """Return the key in a file of one line, `api-key: "KEY"`."""
    name, _, text = Path(path).read_text().partition(": ")
    assert name == "api-key"
    return str(json.loads(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
