"""Main program of the sender process: commands on standard input, replies on standard output.

- Only replies are written there: before any library loads that may print (NCCL does with
  NCCL_DEBUG), standard output is redirected to standard error.
- The process exits when its input closes, and inside a collective when its parent dies.
"""

import os
import sys
from typing import BinaryIO

import msgspec

from rollmesh.core.errors import EngineUnavailable
from rollmesh.trainer.weights.transports.sender import CommandDone, CommandFailed, SenderCommand


def main() -> None:
    """Run commands until the input closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from rollmesh.trainer.weights.transports.sender_commands import CommandRunner  # noqa: PLC0415 - imports torch, which may print

    runner = CommandRunner()
    answer(answers, CommandDone())
    for line in sys.stdin.buffer:
        try:
            answer(answers, runner.do(msgspec.json.decode(line, type=SenderCommand)))
        except (EngineUnavailable, RuntimeError, OSError) as error:
            answer(
                answers, CommandFailed(next(iter(str(error).splitlines()), type(error).__name__))
            )
    runner.close()


def answer(answers: BinaryIO, what: CommandDone | CommandFailed) -> None:
    """Write a reply; the first one, without a command, reports that torch is loaded."""
    answers.write(msgspec.json.encode(what) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
