"""A trainer of several ranks on the batches of tests/flow/test_ranked.py, as a process.

Arguments: settings, address to bind, first step, last step, a checkpoint to restore or '', and a
checkpoint to write after the first step or '', with the model as it is saved and as it is exported.
It prints one JSON object a line: `address`, then `step`, `loss` and `grad_norm` of each step, and
at the end `gone`, an error or ''.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rollmesh.core.config import load_config
from rollmesh.core.errors import RankGone
from rollmesh.core.logs import setup
from rollmesh.trainer.controller.spec import Meeting
from rollmesh.trainer.ranked import RankedPolicy
from rollmesh.trainer.weights.transfer import Payload, write_folder
from rollmesh.wire.keys import Role, read_keys
from tests.flow.test_ranked import step_and_end


def main(settings: str, bind: str, first: str, last: str, restored: str, written: str) -> None:
    config = load_config(Path(settings))
    setup("trainer", config.run_folder())
    meeting = Meeting(bind, lambda address: report(address=address.partition("#")[0]))
    keys = read_keys(role=Role.PUBLISHER)
    path, trainer, folder = config.model.path, config.trainer, config.run_folder()
    gone = ""
    try:
        with RankedPolicy(path, trainer, folder, keys, meeting=meeting) as policy:
            if restored:
                policy.restore(Path(restored))
            for step in range(int(first), int(last) + 1):
                done = step_and_end(policy, step)
                report(step=step, loss=done.loss, grad_norm=done.grad_norm)
                if written and step == int(first):
                    write(policy, Path(written))
    except RankGone as error:
        gone = str(error)
    report(gone=gone)


def write(policy: RankedPolicy, folder: Path) -> None:
    folder.mkdir()
    policy.snapshot(folder)
    while not policy.is_snapshot_written():
        pass
    policy.save(folder / "saved")
    parts = policy.export(folder / "exported", 1)
    write_folder(Payload(1, str(folder / "exported"), parts))


def report(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
