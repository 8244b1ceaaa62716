"""`rollmesh VERB ...`: find the verb, call it, and turn errors into exit codes.

- A verb's module is imported only when it is called, so `--help` is fast and a process loads only
  what it uses.
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
from rollmesh.core.choices import instead_of
from rollmesh.core.errors import UserError
from rollmesh.core.file_modes import restricted_files
from rollmesh.core.printable import printable_lines
from rollmesh.core.process import INTERRUPTED, OK, USAGE, attach_to_launcher, is_launched
from rollmesh.core.redaction import redact_output


class Verb(NamedTuple):
    """Where a verb is, and its line in the help."""

    target: str
    line: str


VERBS = {
    "demo": Verb("rollmesh.cli.demo:main", "train a tiny agent on this machine while you watch"),
    "up": Verb("rollmesh.cli.up:main", "start a mesh with the settings of a mesh.toml"),
    "init": Verb("rollmesh.cli.init:main", "write a mesh.toml for your model and environment"),
    "play": Verb("rollmesh.cli.play:main", "run a task of an environment and print what was said"),
    "eval": Verb("rollmesh.cli.eval:main", "evaluate a model on an environment's tasks"),
    "status": Verb("rollmesh.cli.status:main", "show a run: progress, workers, queue, engines"),
    "trace": Verb("rollmesh.cli.trace:main", "report what a run selects against: trace bias RUN"),
    "drain": Verb("rollmesh.cli.drain:main", "end a worker once its rollouts are done"),
    "dashboard": Verb("rollmesh.cli.dashboard:main", "serve the page of a run, or list the runs"),
    "engine": Verb("rollmesh.cli.rooms:engine", "run the embedded engine alone"),
    "router": Verb("rollmesh.cli.rooms:router", "run a router alone"),
    "worker": Verb("rollmesh.cli.worker:main", "run an env worker alone"),
    "gateway": Verb("rollmesh.cli.gateway:main", "serve sessions to agents that run elsewhere"),
    "coordinator": Verb("rollmesh.cli.coordinator:main", "share a run's GPUs with others"),
    "train": Verb("rollmesh.cli.rooms:train", "run a trainer alone"),
    "scheduler": Verb("rollmesh.cli.scheduler:main", "share one GPU fleet between pipelines"),
    "keys": Verb("rollmesh.cli.keys:main", "write the keys of a mesh that spans machines"),
    "healthy": Verb("rollmesh.cli.healthy:main", "check whether the process at an address serves"),
    "make-model": Verb("rollmesh.cli.make_model:main", "write the demo's warm-started tiny model"),
}

WRITES_FOR_USERS = frozenset({"init", "make-model"})
"""Verbs whose files are the user's own rather than a run's."""

TRAIN = frozenset({"torch", "transformers", "safetensors", "llguidance", "matplotlib"})
"""Modules of the extra `train`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb of `argv` (sys.argv's where None); its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    redact_output(with_stdout=is_launched())
    attach_to_launcher()
    code = OK
    # A user's own files, such as mesh.toml or a model, follow the user's umask; what launch
    # starts has launch's.
    keeps_umask = is_launched() or not words or words[0] in WRITES_FOR_USERS
    try:
        try:
            with nullcontext() if keeps_umask else restricted_files():
                code = run(words)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread():
            raise
        # Python flushes once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def run(words: list[str]) -> int:
    """Run the verb; the exit code. Mistakes are printed to stderr."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return OK if words else USAGE
    if words[0] in ("-V", "--version", "version"):
        print(f"rollmesh {__version__}")
        return OK
    verb = VERBS.get(words[0])
    if verb is None:
        return complain(f"no verb {words[0]!r}; {instead_of(words[0], VERBS)}")
    try:
        return load(verb)(words[1:])
    except UserError as error:
        return complain(str(error))
    except ModuleNotFoundError as error:
        if error.name not in TRAIN:
            raise
        return complain(f"{words[0]} needs {error.name}: pip install 'rollmesh[train]'")
    except KeyboardInterrupt:
        return INTERRUPTED


def load(verb: Verb) -> Callable[[list[str]], int]:
    """The verb's function, imported now."""
    module, _, name = verb.target.partition(":")
    function: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return function


def usage() -> str:
    """The text of `rollmesh --help`."""
    lines = [f"  {name:<12}{verb.line}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: rollmesh VERB ...",
            "",
            "Agent rollouts for reinforcement learning of language models.",
            "",
            *lines,
            "",
            "`rollmesh VERB --help` explains a verb; `rollmesh --version` prints the version.",
        ]
    )


def is_unread() -> bool:
    """Whether the reader of stdout has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def complain(line: str) -> int:
    """Print the mistake and its remedy to stderr."""
    print(f"rollmesh: {printable_lines(line)}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
