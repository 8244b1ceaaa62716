"""Run a supervisor over the children that a test describes, as a process.

Arguments: a run folder, a JSON file of plans, one of settings, and `local` or `runner`: the
children are started by the supervisor, or by a runner as on another node. The last line of output
is the run's end as JSON. It is a separate process because a supervisor ends every process below it.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, load_config
from rollmesh.core.logs import setup
from rollmesh.core.orphans import new_mark
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.hosts.remote import CommandHost
from rollmesh.launch.plan import ChildPlan
from rollmesh.launch.supervisor import Supervisor, open_mesh
from rollmesh.launch.telemetry import TelemetrySampler


async def main(config: Config, plans: list[ChildPlan], host: str = "local") -> None:
    run_folder, clock = RunFolder(config), SystemClock()
    setup("launch", run_folder.path, on_console=False)
    mark = new_mark("launch")
    node = CommandHost(["env"], "node-1", "127.0.0.1", run_folder.logs, mark)
    hosts = {plan.role: node for plan in plans} if host == "runner" else {}
    supervisor = Supervisor(open_mesh(plans, mark, hosts), config.launch, run_folder, clock)
    sampler = TelemetrySampler(supervisor, run_folder, clock, config.launch)
    sampling = asyncio.create_task(sampler.follow())
    end = await supervisor.run()
    sampling.cancel()
    run_folder.end(end.state, end.cause)
    sys.stdout.buffer.write(msgspec.json.encode({"end": end, "notes": supervisor.notes}))


if __name__ == "__main__":
    described = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=list[ChildPlan])
    asyncio.run(main(load_config(Path(sys.argv[3])), described, *sys.argv[4:]))
