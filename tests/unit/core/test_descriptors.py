"""The limit of open files is raised if possible, and named if not or if it is reached."""

import subprocess
import sys

ASK = """
import resource, sys
from rollmesh.core.descriptors import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    allow_descriptors(int(sys.argv[3]), "worker.max_rollouts = 64")
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
except ValueError as error:
    print(error)
"""


def output_with(soft: int, hard: int, num: int = 256) -> str:
    """The messages of a process with these limits that needs `num` files."""
    argv = [sys.executable, "-c", ASK, str(soft), str(hard), str(num)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_soft_limit_is_raised_as_far_as_it_may() -> None:
    assert output_with(64, 512) == "(512, 512)"


def test_a_hard_limit_that_is_too_low_is_named_with_the_setting_and_the_remedy() -> None:
    assert output_with(64, 64) == (
        "worker.max_rollouts = 64 needs 320 open files and this shell allows 64; "
        "raise the limit: ulimit -n 65536"
    )
    assert "raise the limit: ulimit -n 70064" in output_with(64, 64, 70_000), "it would suffice"


TAKE_ALL = """
import os, resource
from rollmesh.core.descriptors import share_in_use
from rollmesh.core.metrics import rss_bytes
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
print(share_in_use() < 0.2, rss_bytes() > 10**6)
try:
    while True:
        os.dup(0)
except OSError:
    print(share_in_use(), rss_bytes() > 10**6)
"""


def test_figures_can_be_read_when_every_descriptor_is_in_use() -> None:
    done = subprocess.run([sys.executable, "-c", TAKE_ALL], capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == ["True True", "1.0 True"]
