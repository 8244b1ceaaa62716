"""The ferry's process: commands come on standard input, answers go where standard output was.

Invariants: nothing but answers goes there, since before a library is loaded that may print (NCCL
does, where NCCL_DEBUG asks for it) standard output has become standard error; the process ends with
its input, and in a collective with its parent. Driven by ferry.py, a line of JSON a command.
"""

import os
import sys
from typing import BinaryIO

import msgspec

from rollmesh.core.errors import EngineUnavailable
from rollmesh.trainer.weights.carriers.ferry import Command, Done, Failed


def main() -> None:
    """Carry out commands until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from rollmesh.trainer.weights.carriers.crossing import Crossing  # noqa: PLC0415 - torch comes with it

    crossing = Crossing()
    tell(answers, Done())
    for line in sys.stdin.buffer:
        try:
            tell(answers, crossing.do(msgspec.json.decode(line, type=Command)))
        except (EngineUnavailable, RuntimeError, OSError) as error:
            tell(answers, Failed(next(iter(str(error).splitlines()), type(error).__name__)))
    crossing.close()


def tell(answers: BinaryIO, what: Done | Failed) -> None:
    """Answer the command; before the first, say that we are there."""
    answers.write(msgspec.json.encode(what) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
