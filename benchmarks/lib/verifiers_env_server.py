"""verifiers' env server under the same load, in a venv that has verifiers and not rollmesh.

    .venv-peers/verifiers/bin/python verifiers_env_server.py --workers N --ready-fd N

Written against verifiers 0.4.0. Each line at its address is a JSON object {num, window, turns,
tokens, padding}: that many rollouts run through its EnvClient, `window` at a time, and a line with
the seconds answers. Its environment, which its servers import from this file, gives each trace
prepared nodes, as serving_worker.py does. It does not yield between turns, so its server streams
each answer in one piece, which is its cheapest way.
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import time
from importlib import import_module
from typing import Any

PROMPT_TOKENS = 16

vf: Any = import_module("verifiers.v1")
kinds: Any = import_module("verifiers.v1.types")
traces: Any = import_module("verifiers.v1.trace")
single: Any = import_module("verifiers.v1.envs.single_agent")
graph: Any = import_module("verifiers.v1.graph")
episodes: Any = import_module("verifiers.v1.episode")
agents: Any = import_module("verifiers.v1.configs.agent")

__all__ = ["BenchEnv", "BenchTaskset"]


class BenchData(vf.TaskData):  # type: ignore[misc]  # verifiers is not installed here
    """The request of a lap."""

    num_turns: int = 1
    num_tokens: int = 0
    padding: str = ""


class BenchTask(vf.Task[BenchData]):  # type: ignore[misc]  # as above
    """A task without other content."""


class BenchTaskset(vf.Taskset[BenchTask, vf.TasksetConfig]):  # type: ignore[misc]  # as above
    """An unused task set: the laps send their own tasks."""

    def load(self) -> Any:
        """Return one task, which the load replaces."""
        yield BenchTask(BenchData(prompt="bench"))


class BenchEnv(single.SingleAgentEnv):  # type: ignore[misc]  # as above
    """An environment without an agent, a harness or a model."""

    async def run_episode(
        self, task: Any, ctx: Any, *, on_trace: Any = None, on_discard: Any = None
    ) -> Any:
        """Return a trace of all turns at once."""
        del on_discard
        about = traces.TraceTask(type="BenchTask", data=task.data)
        config = agents.AgentConfig(model=ctx.model, client=ctx.client)
        found = traces.Trace(task=about, agent=traces.AgentInfo(config=config))
        on_trace(found)
        for prompt, reply in nodes_of(task.data.num_turns, task.data.num_tokens):
            found.nodes.append(prompt)
            found.nodes.append(reply)
            found.notify()
        found.is_completed = found.ok = True
        info = episodes.EnvInfo(id=self.config.env_id)
        return episodes.Episode(env=info, task=about, traces=[found], ok=True)


@functools.cache
def nodes_of(num_turns: int, num_tokens: int) -> list[tuple[Any, Any]]:
    """Return each turn's two nodes; they are read-only, so traces share them."""
    fields = {"message": kinds.AssistantMessage(content=""), "sampled": True}
    fields |= {"token_ids": list(range(num_tokens)), "mask": [True] * num_tokens}
    fields |= {"logprobs": [-0.5] * num_tokens}
    asked = {"message": kinds.UserMessage(content=""), "token_ids": list(range(PROMPT_TOKENS))}
    return [
        (
            graph.MessageNode(parent=2 * turn - 1 if turn else None, **asked),
            graph.MessageNode(parent=2 * turn, **fields),
        )
        for turn in range(num_turns)
    ]


def serve(num_workers: int, addresses: Any, config: Any, parent: Any) -> None:
    """Run the server, or the broker; it ends with its parent."""
    import_module("verifiers.v1.serve").serve_env(
        max_workers=num_workers,
        elastic=False,
        address="tcp://127.0.0.1:0",
        address_queue=addresses,
        config_data=config,
        death_pipe=parent,
    )


async def answer_laps(address: str, ready_fd: int) -> None:
    """Run the requested laps until killed."""
    client = import_module("verifiers.v1.serve").EnvClient(address)
    await client.wait_for_server_startup()
    endpoint = import_module("verifiers.v1.configs.client").EvalClientConfig(
        base_url="http://127.0.0.1:9/v1", api_key_var="PEER_API_KEY"
    )

    async def run(order: dict[str, Any]) -> None:
        task = {"prompt": "bench", "num_turns": order["turns"], "num_tokens": order["tokens"]}
        task["padding"] = "x" * order["padding"]
        for _ in range(order["num"] // order["window"]):
            whole = await client.run(endpoint, "m", vf.SamplingConfig(), task)
            assert whole.ok, whole.errors
            assert len(whole.traces[0].nodes) == 2 * order["turns"]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            order = json.loads(line)
            began_s = time.perf_counter()
            await asyncio.gather(*[run(order) for _ in range(order["window"])])
            writer.write(json.dumps(time.perf_counter() - began_s).encode() + b"\n")

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    ready = {"role": "verifiers", "pid": os.getpid(), "address": f"tcp://127.0.0.1:{port}"}
    with os.fdopen(ready_fd, "w") as pipe:
        pipe.write(json.dumps(ready) + "\n")
    await listening.serve_forever()


def main() -> None:
    """Start a server, then answer laps."""
    arguments = argparse.ArgumentParser(prog="verifiers_env_server.py")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--ready-fd", type=int, required=True)
    options = arguments.parse_args()
    os.environ["PEER_API_KEY"] = "none"
    tree = {
        "taskset": {"id": "verifiers_env_server"},
        "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
    }
    config = import_module("verifiers.v1.utils.loaders").resolve_env_config(tree)
    data = import_module("verifiers.v1.serve").env_config_data(config)
    spawn = multiprocessing.get_context("spawn")
    addresses = spawn.Queue()
    _kept, parent = spawn.Pipe()
    spawn.Process(target=serve, args=(options.workers, addresses, data, parent)).start()
    asyncio.run(answer_laps(addresses.get(), options.ready_fd))


if __name__ == "__main__":
    main()
