"""Print as one JSON line, by rank 0, the values that a loop sees under a plain torchrun.

torchrun --nproc-per-node 2 -m tests.flow.plain_program
"""

import json
import os
import sys

import torch

from rollmesh.core.errors import ConfigError
from rollmesh.core.ids import GroupId
from rollmesh.tensors.plane import current
from rollmesh.trainer.controller.answers import Reduce
from rollmesh.trainer.controller.controller import RoleCall
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.torchrun import PlainRank
from rollmesh.trainer.staleness import GroupAdmitted, StalenessManager, StalenessSettings
from tests.flow.rank_group import plan

PAD = DispatchRule(uneven="pad")


def main() -> None:
    rank = int(os.environ["RANK"])
    manager = StalenessManager(StalenessSettings(batch=2, max_staleness=1, max_concurrent=8))
    values: dict[str, object] = {}
    with PlainRank(plan(2), manager) as controller:
        rows = [{"x": torch.full((3,), float(rank + n))} for n in range(rank + 1)]
        taken = controller.take(current().remotize(rows), 0)
        values["is_as_it_was"] = taken is rows
        values["plane"] = [each is None for each in (current().store, current().buffer)]
        own = controller.call(RoleCall("sums.double", rule=PAD), taken)
        values["own"] = [own["total"], own["num_rows"], len(own["twice"])]
        reduce = Reduce(rules={"total": "sum", "num_rows": "mean"})
        of_all = controller.call(RoleCall("sums.double", rule=PAD, reduce=reduce), taken)
        values["of_all"] = [of_all["total"], of_all["num_rows"], len(of_all["twice"])]
        values["twice"] = of_all["twice"][0].tolist()
        if (
            rank == 0
        ):  # a call without a reduction runs on its own rank only, and blocks no other rank
            values["setting"] = controller.call("sums.setting", "colour")
            try:
                controller.call("sums.nothing")
            except ConfigError as error:
                values["error"] = str(error)
        for held in (controller.clear_batches(taken), controller.end_step(0)):
            values["held"] = [len(held.processes), len(held.leaks), held.num_cleared]
        assert controller.staleness is not None
        before = controller.staleness.capacity
        manager.step(GroupAdmitted(GroupId("loop", 0), 1))
        values["capacity"] = [before, controller.staleness.capacity]
    if rank == 0:
        sys.stdout.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
