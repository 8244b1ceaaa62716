"""A process that has torch loaded and, for each line that it reads, becomes a trainer in a child.

Owns nothing: argv names the settings and the router. Invariants: it says the child's pid, then how
that ended; the child is a trainer like any other, but that it begins in a moment. Driven by
trained_mesh.py, which kills the child.
"""

import os
import sys
from pathlib import Path

from rollmesh.core.config import Config, load_config
from rollmesh.core.errors import UserError
from rollmesh.core.process import FAILED, USAGE
from rollmesh.trainer.process import run


def life(config: Config, router: str) -> int:
    """One trainer's; its exit code."""
    try:
        return run(config, router, None)
    except UserError as error:
        sys.stderr.write(f"rollmesh: {error}\n")
        return USAGE
    except BaseException as error:  # noqa: BLE001 - door: what ends a trainer is for the test
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return FAILED


def main() -> None:
    config, router = load_config(Path(sys.argv[1])), sys.argv[2]
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(life(config, router))
        tell(pid)
        tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
