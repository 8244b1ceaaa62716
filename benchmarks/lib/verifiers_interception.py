"""verifiers' interception server as a process, in a venv that has verifiers and not rollmesh.

    .venv-peers/verifiers/bin/python verifiers_interception.py --engine URL --keys FILE --ready-fd N

Written against verifiers 0.4.0. It registers one session per connection, as verifiers' rollouts do;
the sessions' keys are written to FILE, one per line.
"""

import argparse
import asyncio
import json
import os
from importlib import import_module
from typing import Any, TextIO

NUM_SESSIONS = 32


def new_session(engine: str) -> Any:
    """Return a rollout's session that calls the engine's chat endpoint."""
    agent, trace, task = (
        import_module(f"verifiers.v1.{name}") for name in ("configs.agent", "trace", "task")
    )
    client = import_module("verifiers.v1.configs.client").EvalClientConfig(
        base_url=f"{engine}/v1", api_key_var="PEER_API_KEY"
    )
    context = import_module("verifiers.v1.clients").ModelContext(model="policy", client=client)
    kept = trace.Trace(
        task=trace.TraceTask(type="Bench", data=task.TaskData(prompt="bench")),
        agent=trace.AgentInfo(config=agent.AgentConfig(model="policy", client=client)),
    )
    return import_module("verifiers.v1.session").RolloutSession(ctx=context, trace=kept)


async def serve(engine: str, keys: TextIO, ready_fd: int) -> None:
    """Serve until killed."""
    async with import_module("verifiers.v1.interception").InterceptionServer() as server:
        for _ in range(NUM_SESSIONS):
            key, _ = server.register(new_session(engine))
            print(key, file=keys)
        keys.close()
        ready = {"role": "verifiers", "pid": os.getpid(), "address": server.base_url}
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(ready) + "\n")
        await asyncio.Event().wait()


def main() -> None:
    """Parse and serve."""
    arguments = argparse.ArgumentParser(prog="verifiers_interception.py")
    arguments.add_argument("--engine", required=True)
    arguments.add_argument("--keys", type=argparse.FileType("w"), required=True)
    arguments.add_argument("--ready-fd", type=int, required=True)
    options = arguments.parse_args()
    os.environ["PEER_API_KEY"] = "none"
    asyncio.run(serve(options.engine, options.keys, options.ready_fd))


if __name__ == "__main__":
    main()
