"""Request rollouts of an environment's tasks from a running mesh.

    python -m examples.ask tcp://127.0.0.1:5555 examples/quiz/mesh.toml -n 4 --num-tasks 8

- Reads `env` and `env_settings` of the file; the mesh's workers run the environment.
- Prints one line per task, in the order in which the groups end.
"""

import argparse
import itertools
import sys
from pathlib import Path

from rollmesh.core.config import load_config
from rollmesh.core.errors import AddressError, UserError
from rollmesh.envs.loading import load_env
from rollmesh.serve.client.arrivals import Arrival, Dropped
from rollmesh.serve.client.sync_client import SyncRolloutClient


def result_line(arrival: Arrival) -> str:
    """Return the line that reports the group of one task."""
    if isinstance(arrival, Dropped):
        return f"{arrival.group_id}  no result: {arrival.reason}"
    rollouts = arrival.record.rollouts
    each = ", ".join(
        f"{rollout.outcome} {'-' if rollout.reward is None else format(rollout.reward, 'g')}"
        for rollout in rollouts
    )
    return f"{arrival.record.task.id}  {each}  {arrival.token_ids.size} tokens"


def main(options: argparse.Namespace) -> None:
    """Request all groups and print their results."""
    config = load_config(options.config, options.overrides)
    env = load_env(config.env, config.env_settings)
    tasks = itertools.islice(env.tasks(options.split, options.seed), options.num_tasks)
    with SyncRolloutClient(options.router) as client:
        if not client.meet_router(options.patience_s):
            raise AddressError(f"{options.router}: no router answers at this address")
        for task in tasks:
            client.ask(task, options.num_samples, env=config.env, deadline_s=options.deadline_s)
        for arrival in client.stream():
            print(result_line(arrival), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.ask", description="Request rollouts from a mesh."
    )
    parser.add_argument("router", help="tcp:// address, as printed by `rollmesh status`")
    parser.add_argument("config", type=Path, help="a mesh.toml with `env` and `env_settings`")
    parser.add_argument(
        "-n", dest="num_samples", type=int, default=4, help="rollouts per task (default: 4)"
    )
    parser.add_argument("--num-tasks", type=int, default=8)
    parser.add_argument(
        "--split", default="eval", help="train, eval, or another split of the environment"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the task order")
    parser.add_argument(
        "--deadline-s", type=float, default=0.0, help="per group, in seconds; 0: none"
    )
    parser.add_argument(
        "--patience-s", type=float, default=5.0, help="seconds to wait for the router"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(arguments())
    except UserError as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit(130)
