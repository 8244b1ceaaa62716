"""The limit of open files is raised where it may be, and named where it may not."""

import subprocess
import sys

ASK = """
import resource, sys
from rollmesh.core.descriptors import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    allow_descriptors(256, "worker.max_rollouts = 64")
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
except ValueError as error:
    print(error)
"""


def told(soft: int, hard: int) -> str:
    """What a process says whose limits are these."""
    argv = [sys.executable, "-c", ASK, str(soft), str(hard)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_soft_limit_is_raised_as_far_as_it_may() -> None:
    assert told(64, 512) == "(512, 512)"


def test_a_hard_limit_that_is_too_low_is_named_with_the_setting_and_the_remedy() -> None:
    assert told(64, 64) == (
        "worker.max_rollouts = 64 needs 320 open files and this shell allows 64; "
        "raise the limit: ulimit -n 65536"
    )
