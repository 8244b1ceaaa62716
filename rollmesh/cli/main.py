"""`rollmesh VERB ...`: find the verb, call it, and turn errors into exit codes.

- A verb's module is imported only when the verb is called, so `--help` is fast and a process loads
  only what it uses.
- A user's mistake is one line on stderr and exit code 2, never a traceback.
- A closed stdout (`| head`) is not an error.

    0 done   1 a process failed   2 the user can fix it   130 stopped by a signal
"""

import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from rollmesh import __version__
from rollmesh.core.errors import RankGone, UserError
from rollmesh.core.files import restricted_files
from rollmesh.core.process import FAILED, INTERRUPTED, OK, USAGE, attach_to_launcher, is_launched
from rollmesh.core.redaction import redact_output
from rollmesh.core.text import instead_of, printable_lines


class Verb(NamedTuple):
    """The function of a verb, and its line in the help."""

    target: str
    line: str


VERBS = {
    "demo": Verb(
        "rollmesh.cli.runs:demo", "train a tiny agent on this machine, as a demonstration"
    ),
    "up": Verb("rollmesh.cli.runs:up", "start a mesh with the settings of a mesh.toml"),
    "doctor": Verb("rollmesh.cli.doctor:main", "check this machine before a run starts here"),
    "init": Verb("rollmesh.cli.files:init", "write a mesh.toml for your model and environment"),
    "play": Verb("rollmesh.cli.play:main", "run one task and print its conversation and score"),
    "eval": Verb("rollmesh.cli.eval:main", "evaluate a model on an environment's tasks"),
    "status": Verb("rollmesh.cli.status:status", "show a run: progress, workers, queue, engines"),
    "trace": Verb("rollmesh.cli.trace:main", "report selection bias of a run: trace bias RUN"),
    "drain": Verb("rollmesh.cli.status:drain", "let a worker finish its rollouts, then stop it"),
    "dashboard": Verb(
        "rollmesh.cli.status:dashboard", "serve the dashboard of a run, or list runs"
    ),
    "engine": Verb(
        "rollmesh.cli.processes:engine",
        "add, remove or list a mesh's engines, or run an embedded one",
    ),
    "router": Verb("rollmesh.cli.processes:router", "run a router process"),
    "worker": Verb("rollmesh.cli.processes:worker", "run an environment worker process"),
    "gateway": Verb("rollmesh.cli.gateway:main", "serve capture sessions to agents elsewhere"),
    "coordinator": Verb("rollmesh.cli.coordinator:main", "share a run's GPUs with other runs"),
    "train": Verb("rollmesh.cli.processes:train", "run a trainer process"),
    "rank": Verb("rollmesh.cli.processes:rank", "run one rank of a trainer on another host"),
    "scheduler": Verb("rollmesh.cli.scheduler:main", "share one GPU fleet between pipelines"),
    "keys": Verb("rollmesh.cli.files:keys", "manage the keys of a mesh across machines"),
    "healthy": Verb("rollmesh.cli.healthy:main", "check that a process serves (health check)"),
    "make-model": Verb("rollmesh.cli.files:make_model", "write the demo's tiny warm-started model"),
}

USER_FILE_VERBS = frozenset({"init", "make-model"})
"""Verbs whose files are the user's own rather than a run's."""

EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "llguidance", "matplotlib"), "train"),
    "ray": "ray",
}
"""By module: the extra that installs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb of `argv` (default: sys.argv) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    redact_output(with_stdout=is_launched())
    attach_to_launcher()
    code = OK
    # A user's own files, such as mesh.toml or a model, follow the user's umask; children of launch
    # inherit its umask.
    keeps_umask = is_launched() or not words or words[0] in USER_FILE_VERBS
    try:
        try:
            with nullcontext() if keeps_umask else restricted_files():
                code = run(words)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        if not is_stdout_closed():
            raise
        # Python flushes stdout again at exit, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def run(words: list[str]) -> int:
    """Run the verb and return its exit code. Errors are printed to stderr."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return OK if words else USAGE
    if words[0] in ("-V", "--version", "version"):
        print(f"rollmesh {__version__}")
        return OK
    verb = VERBS.get(words[0])
    if verb is None:
        return report_error(f"unknown verb {words[0]!r}; {instead_of(words[0], VERBS)}")
    try:
        return load(verb)(words[1:])
    except UserError as error:
        return report_error(str(error))
    except RankGone as error:  # a fault: after a restart, the trainer resumes from its files
        report_error(str(error))
        return FAILED
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = EXTRAS[error.name]
        return report_error(
            f"{words[0]} needs {error.name}: pip install '.[{extra}]' in a checkout"
        )
    except KeyboardInterrupt:
        return INTERRUPTED


def load(verb: Verb) -> Callable[[list[str]], int]:
    """Import the verb's module and return its function."""
    module, _, name = verb.target.partition(":")
    function: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return function


def usage() -> str:
    """Return the text of `rollmesh --help`."""
    lines = [f"  {name:<12}{verb.line}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: rollmesh VERB ...",
            "",
            "Agent rollouts for reinforcement learning of language models.",
            "",
            *lines,
            "",
            "`rollmesh VERB --help` describes a verb; `rollmesh --version` prints the version.",
        ]
    )


def is_stdout_closed() -> bool:
    """Return whether the reader of stdout has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def report_error(line: str) -> int:
    """Print the error and its remedy to stderr."""
    print(f"rollmesh: {printable_lines(line)}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
