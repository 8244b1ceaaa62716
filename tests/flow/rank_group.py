"""A train controller with ranks of tests/flow/rank_roles.py, for tests and as a program.

python -m tests.flow.rank_group     starts two ranks, prints their pids, and waits to be killed
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

import msgspec
import torch

from rollmesh.tensors.handles import pack
from rollmesh.tensors.plane import use
from rollmesh.trainer.controller.controller import RankPlan, TrainController
from rollmesh.trainer.controller.rank_group import RankGroupSettings
from rollmesh.trainer.controller.spec import PlaneSpec, RoleSpec, Topology
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime

SMALL = PlaneSpec(store_bytes=2**24, buffer_bytes=2**24)
ROLE = "tests.flow.rank_roles:Arithmetic"


def plan(
    num_ranks: int, width: int = 1, make: str = ROLE, report_timeout_s: float = 10.0
) -> RankPlan:
    """Plan ranks with one role, `sums`, made with one setting."""
    return RankPlan(
        topology=Topology(num_ranks, width),
        roles={"sums": RoleSpec(make=make, settings={"colour": "blue"} if make == ROLE else {})},
        plane=SMALL,
        settings=RankGroupSettings(
            start_s=60.0,
            beat_s=0.1,
            silence_s=20.0,
            settle_s=1.0,
            report_timeout_s=report_timeout_s,
        ),
    )


@contextlib.contextmanager
def serving_runtime(lease_s: float = SMALL.lease_s) -> Iterator[TensorRuntime]:
    """This process's tensor runtime, which serves other processes."""
    home = TensorRuntime(msgspec.structs.replace(SMALL, lease_s=lease_s), None)
    before = use(home.plane)
    try:
        yield home
    finally:
        use(before)
        home.close()


def main() -> None:
    with serving_runtime() as home:
        if sys.argv[1:] == ["owner"]:
            print_and_wait(pack(home.plane.remotize([torch.ones(3), torch.ones(3)])).hex())
        else:
            with TrainController(plan(2), home) as controller:
                print_and_wait(" ".join(map(str, controller.pids())))


def print_and_wait(line: str) -> None:
    """Print a line, and wait to be killed."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
