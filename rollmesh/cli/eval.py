"""`rollmesh eval`: rollouts of an environment's tasks, and what they say of a model.

Owns the verb's arguments and the order of things: check, start a small mesh or join one, evaluate,
report. Invariants: whatever ends it, `--resume` can go on with the folder, and what has a result
does not run again; no process of the small mesh is left behind. Driven by people.
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.endpoint import Upstream, add_upstream, relay, upstream_of
from rollmesh.cli.evaltable import progress, show
from rollmesh.cli.options import (
    add_model_dir,
    add_no_keys,
    add_run,
    add_set,
    config_of,
    lay_model_over,
    model_defaults,
    parser,
    quoted,
)
from rollmesh.core.config import Config, write_config
from rollmesh.core.errors import UserError
from rollmesh.core.file_modes import make_folder
from rollmesh.core.process import FAILED, INTERRUPTED, OK, USAGE, stop_event
from rollmesh.core.run_state import EVAL_MESH
from rollmesh.core.types import TRAINED_OUTCOMES, Task
from rollmesh.envs.env import Env
from rollmesh.envs.forwarding import forward_to
from rollmesh.envs.isolation import isolate_programs
from rollmesh.envs.loading import load_env
from rollmesh.envs.openai_client import close_pool
from rollmesh.launch.checks import check
from rollmesh.launch.folder import move_aside
from rollmesh.launch.keys import keys_of
from rollmesh.launch.machine import RunEnd
from rollmesh.launch.run import ServingMesh
from rollmesh.serve.client.evaluation_files import Plan, Row, pose, read_plan, rows_in, write_plan
from rollmesh.serve.client.scores import Report, report_of
from rollmesh.wire.key_search import find_keys
from rollmesh.wire.keys import Keys, Role
from rollmesh.wire.sockets import check_admitted

SETTINGS: dict[str, Any] = {"worker": {"failed_sibling": "score_rest"}}
FOLDER = Path("runs/eval")
CONFIG = "config.json"
NUM_SAMPLES, NUM_TASKS, SPLIT = 1, 100, "eval"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to evaluate, where, and how to say it."""

    plan: Plan
    config: Config
    folder: Path
    router: str
    """Address of the mesh to use; '' to start one."""
    upstream: Upstream | None
    """The endpoint to evaluate instead, without a mesh."""
    run: Path | None
    """With `router`: the run folder that has its keys."""
    has_keys: bool
    """Make keys for the mesh that it starts."""
    resumes: bool
    says_json: bool


def main(argv: list[str]) -> int:
    """Evaluate; the exit code."""
    order = order_of(arguments().parse_args(argv))
    env = load_env(order.plan.env, order.plan.env_settings)
    tasks = pose(env, order.plan)
    work = carry_out_locally(order, env, tasks) if order.upstream else carry_out(order, tasks)
    return conclude(order, asyncio.run(work))


def arguments() -> argparse.ArgumentParser:
    """The verb's."""
    found = parser("eval", "Evaluate a model: n rollouts of each of an environment's tasks.")
    found.add_argument("--env", help="built in, or package.module:Class")
    add_model_dir(found)
    found.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="URL",
        help="of a server with that model; may be given again; none: the embedded engine",
    )
    found.add_argument("--router", default="", help="tcp:// address of a mesh that runs already")
    add_upstream(found)
    found.add_argument(
        "-n", dest="num_samples", type=int, help=f"rollouts of each task ({NUM_SAMPLES})"
    )
    found.add_argument("--num-tasks", type=int, help=f"at most so many tasks ({NUM_TASKS})")
    found.add_argument("--split", help=f"which of the environment's tasks ({SPLIT})")
    found.add_argument(
        "--pass-threshold",
        type=float,
        metavar="REWARD",
        help="a rollout with at least this reward succeeded, where the environment does not "
        "report success and rewards are not 0 or 1 (default: pass_threshold of --config)",
    )
    found.add_argument("--out", type=Path, default=FOLDER, help=f"folder of results ({FOLDER})")
    found.add_argument("--resume", action="store_true", help="go on with what stands in --out")
    found.add_argument("--json", action="store_true", help="report as JSON, not as a table")
    found.add_argument("--config", type=Path, help="mesh.toml, for all other settings")
    add_set(found)
    add_run(found)
    add_no_keys(found)
    return found


def order_of(options: argparse.Namespace) -> Order:
    """What the arguments ask for; UserError, one line, where they cannot mean anything."""
    if options.router and (options.engines or options.model_dir):
        raise UserError("--router: that mesh has its model and engines; leave the others out")
    if options.base_url and (options.router or options.engines or options.model_dir):
        raise UserError("--base-url: needs no --router, --engine or --model-dir; leave them out")
    upstream = upstream_of(options)
    stored = read_plan(options.out) if options.resume else None
    if stored and not options.config:
        options.config = options.out / CONFIG
    if options.env:
        options.overrides.append(f"env={quoted(options.env)}")
    if options.pass_threshold is not None:
        options.overrides.append(f"pass_threshold={options.pass_threshold!r}")
    if options.engines:
        urls = ", ".join(map(quoted, options.engines))
        options.overrides.append(f"engine.urls=[{urls}]")
    lay_model_over(options)
    config = config_of(options, SETTINGS | model_defaults(options))
    plan = Plan(
        env=config.env,
        env_settings=config.env_settings,
        model=_model_of(options, config, upstream),
        split=_first(options.split, stored and stored.split, SPLIT),
        num_tasks=_first(options.num_tasks, stored and stored.num_tasks, NUM_TASKS),
        num_samples=_first(options.num_samples, stored and stored.num_samples, NUM_SAMPLES),
        seed=config.run.seed,
        sampling=config.sampling.eval_policy(),
    )
    check_plan(plan, stored, options.out)
    return Order(
        plan=plan,
        config=config,
        folder=options.out,
        router=options.router,
        upstream=upstream,
        run=options.run,
        has_keys=options.has_keys,
        resumes=options.resume,
        says_json=options.json,
    )


def check_plan(plan: Plan, stored: Plan | None, folder: Path) -> None:
    """UserError if it asks for nothing, or is not what the folder evaluates."""
    for name, number in (("-n", plan.num_samples), ("--num-tasks", plan.num_tasks)):
        if number < 1:
            raise UserError(f"{name} {number}: at least 1")
    for field in Plan.__struct_fields__ if stored else ():
        new, old = getattr(plan, field), getattr(stored, field)
        if new != old:
            raise UserError(
                f"{folder} evaluates with {field} = {_told(old)}, not {_told(new)}; "
                "leave that out, or begin anew without --resume"
            )


def open_folder(order: Order) -> None:
    """Make the folder, moving an older evaluation aside, or keep the one that is resumed."""
    try:
        if not order.resumes:
            move_aside(order.folder)
        make_folder(order.folder, order.config.run.mode)
    except OSError as error:
        raise UserError(f"{order.folder}: {error.strerror}; name another --out") from None
    if order.resumes:
        return
    write_plan(order.plan, order.folder)
    write_config(order.config, order.folder / CONFIG)


async def carry_out(order: Order, tasks: list[Task]) -> RunEnd:
    """Do what is missing; how it ended."""
    # numpy comes with the client, and stays out of the other verbs.
    from rollmesh.serve.client.evaluation import Site, evaluate  # noqa: PLC0415 - see above

    # A mistake that can be seen early moves no older evaluation aside.
    if not order.router:
        await check(mesh_config(order), makes_model=False)
    open_folder(order)
    async with AsyncExitStack() as stack:
        teller = stack.enter_context(progress(order.plan, len(tasks), status_of(order)))
        router, keys, stop = await _enter_mesh(order, stack)
        if stop.done():
            return stop.result()
        site = Site(router, order.folder, order.config.journal, keys)
        evaluating = evaluate(order.plan, tasks, site, teller.on_rows, teller.on_client)
        work = asyncio.create_task(evaluating, name="evaluation")
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return RunEnd(OK, "done")
            return stop.result()
        finally:
            work.cancel()
            await asyncio.wait([work])


async def carry_out_locally(order: Order, env: Env, tasks: list[Task]) -> RunEnd:
    """Do what is missing by rollouts in this process, against order.upstream; how it ended."""
    # numpy and the runtime come with these, and stay out of the other verbs.
    from rollmesh.cli.local_client import LocalClient, LocalRollouts  # noqa: PLC0415 - see above
    from rollmesh.serve.client.evaluation import evaluate_locally  # noqa: PLC0415 - see above

    assert order.upstream
    open_folder(order)
    with relay(order.upstream) as gateway:
        settings = order.config.worker
        isolate_programs(settings, forward_to(gateway.url))
        rollouts = LocalRollouts(env, gateway, order.upstream.model, settings, is_relay=True)
        client = LocalClient(rollouts)
        stop = asyncio.create_task(_stopped(), name="stop")
        with progress(order.plan, len(tasks), order.upstream.base_url) as teller:
            teller.on_client(lambda: "the rollouts that began still run")
            work = asyncio.create_task(
                evaluate_locally(client, order.plan, tasks, order.folder, teller.on_rows)
            )
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            is_done = work.done()
            for each in (work, stop):
                each.cancel()
            await asyncio.wait([work, stop])
        await env.close()
        await close_pool()
        if is_done:
            work.result()
            return RunEnd(OK, "done")
        return stop.result()


async def _enter_mesh(
    order: Order, stack: AsyncExitStack
) -> tuple[str, Keys | None, asyncio.Task[RunEnd]]:
    """The router's address, the keys for it, and a task that ends when the evaluation must."""
    if order.router:
        keys = find_keys(order.router, Role.CLIENT, order.run)
        check_admitted(order.router, keys)
        stop = asyncio.create_task(_stopped(), name="stop")
        stack.callback(stop.cancel)
        return order.router, keys, stop
    started = ServingMesh(mesh_config(order), resume_command(order), has_keys=order.has_keys)
    mesh = await stack.enter_async_context(started)
    keys = keys_of(mesh.keys, Role.CLIENT)
    return "" if mesh.end.done() else mesh.router, keys, mesh.end


async def _stopped() -> RunEnd:
    await stop_event(asyncio.get_running_loop()).wait()
    return RunEnd(INTERRUPTED, "stopped")


def mesh_config(order: Order) -> Config:
    """The small mesh's settings; its run folder stands in the evaluation's."""
    if not order.config.model.path:
        raise UserError("--model-dir is missing: the folder of the model's tokenizer and weights")
    run = msgspec.structs.replace(order.config.run, folder=str(order.folder), name=EVAL_MESH)
    return msgspec.structs.replace(order.config, run=run)


def status_of(order: Order) -> str:
    """What tells how its mesh stands."""
    return "its mesh's status" if order.router else f"`rollmesh status {order.folder}`"


def conclude(order: Order, end: RunEnd) -> int:
    """Say how it went; the exit code. UserError where the mesh could not work."""
    if end.code == USAGE:
        raise UserError(end.reason)
    rows = rows_in(order.folder)
    report = report_of(rows, order.config.pass_threshold)
    if end.code == OK or report.num_rollouts:
        show(order.plan, report, order.folder, as_json=order.says_json)
    if end.code != OK:
        print(f"{end.reason}; `{resume_command(order)}` resumes it", file=sys.stderr)
        return end.code
    if complaint := all_failed(rows, report):
        print(f"rollmesh: {complaint}", file=sys.stderr)
        return FAILED
    return OK


def resume_command(order: Order) -> str:
    """The command that resumes the evaluation."""
    words = ["rollmesh", "eval", "--resume", "--out", str(order.folder)]
    words += ["--router", order.router] if order.router else []
    if order.upstream:
        words += ["--base-url", order.upstream.base_url, "--model", order.upstream.model]
    return shlex.join(words)


def all_failed(rows: Sequence[Row], report: Report) -> str:
    """A line for people where every rollout failed, or there is none; '' otherwise."""
    if any(row.outcome in TRAINED_OUTCOMES for row in rows):
        return ""
    if not rows:
        return "the evaluation has no rollouts"
    cause, failure = next(iter(report.failures.items()))
    error = next(iter(failure.errors), "")
    return f"every rollout failed ({len(rows):,}), most by {cause}{error and f': {error}'}"


def _model_of(options: argparse.Namespace, config: Config, upstream: Upstream | None) -> str:
    """The plan's word for the model; '' for that of a running mesh."""
    if upstream:
        return f"{upstream.model} at {upstream.base_url}"
    return "" if options.router else config.model.path


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _told(value: Any) -> str:
    return msgspec.json.encode(value).decode()
