"""Continue training from a checkpoint: python -m tests.flow.checkpoint_run RUN MODEL N FOLDER

Restores the newest checkpoint of RUN in a policy on one rank, trains up to N steps in all, saves
the model as FOLDER, and prints the figures of each step.
"""

import sys
from pathlib import Path

import msgspec

from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.policy import Policy
from tests.flow.test_ranked import SETTINGS, batch


def figures_of(policy: Policy, first: int, num_steps: int) -> list[dict[str, object]]:
    return [policy.step(batch(step), step).figures() for step in range(first, num_steps)]


def main() -> None:
    run, model, num_steps, folder = sys.argv[1:]
    checkpoints = CheckpointStore(Path(run))
    policy = Policy(model, msgspec.structs.replace(SETTINGS, num_ranks=1))
    newest = checkpoints.newest()
    assert newest is not None
    state = checkpoints.restore(newest, policy)
    figures = figures_of(policy, state.num_steps, int(num_steps))
    policy.save(Path(folder))
    sys.stdout.write(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
