"""`rollmesh eval`: evaluate a model by rollouts of an environment's tasks.

- Order: check, start a small mesh or join one, evaluate, report.
- `--resume` continues an evaluation however it ended; rollouts that have a result do not run again.
- No process of the small mesh is left behind.
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

from rollmesh.cli.eval_report import progress, show
from rollmesh.cli.local_client import ThirdPartyEndpoint, add_upstream, relay, upstream_of
from rollmesh.cli.options import (
    add_model_dir,
    add_no_keys,
    add_run,
    add_set,
    config_of,
    model_defaults,
    parser,
    quoted,
    set_model,
)
from rollmesh.core.config import Config, write_config
from rollmesh.core.errors import UserError
from rollmesh.core.files import make_folder
from rollmesh.core.process import FAILED, INTERRUPTED, OK, USAGE, stop_event
from rollmesh.core.run_state import EVAL_MESH
from rollmesh.core.types import TRAINED_OUTCOMES, Task
from rollmesh.envs.env import Env, close_pool
from rollmesh.envs.isolation import isolate_programs
from rollmesh.envs.loading import load_env
from rollmesh.envs.program import forward_to
from rollmesh.launch.checks import check
from rollmesh.launch.folder import move_aside
from rollmesh.launch.keys import keys_of
from rollmesh.launch.machine import RunEnd
from rollmesh.launch.run import ServingMesh
from rollmesh.serve.client.evaluation_files import (
    EvaluationPlan,
    Row,
    pose,
    read_plan,
    rows_in,
    write_plan,
)
from rollmesh.serve.client.scores import Report, report_of
from rollmesh.wire.keys import Keys, Role, find_keys
from rollmesh.wire.sockets import check_admitted

SETTINGS: dict[str, Any] = {"worker": {"failed_sibling": "score_rest"}}
FOLDER = Path("runs/eval")
CONFIG = "config.json"
NUM_SAMPLES, NUM_TASKS, SPLIT = 1, 100, "eval"


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks, mesh and report of an evaluation."""

    plan: EvaluationPlan
    config: Config
    folder: Path
    router: str
    """Address of the mesh to use; '' to start one."""
    upstream: ThirdPartyEndpoint | None
    """The endpoint to evaluate instead, without a mesh."""
    run: Path | None
    """With `router`: the run folder that has its keys."""
    has_keys: bool
    """Create keys for the mesh that is started."""
    resume: bool
    as_json: bool


def main(argv: list[str]) -> int:
    """Evaluate and return the exit code."""
    request = options_of(arguments().parse_args(argv))
    env = load_env(request.plan.env, request.plan.env_settings)
    tasks = pose(env, request.plan)
    work = (
        evaluate_upstream(request, env, tasks)
        if request.upstream
        else evaluate_on_mesh(request, tasks)
    )
    return conclude(request, asyncio.run(work))


def arguments() -> argparse.ArgumentParser:
    """Return the verb's parser."""
    found = parser("eval", "Evaluate a model by n rollouts of each task of an environment.")
    found.add_argument("--env", help="environment: a built-in name or package.module:Class")
    add_model_dir(found)
    found.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="URL",
        help="SGLang server with that model; may be repeated (default: the embedded engine)",
    )
    found.add_argument(
        "--router", default="", help="tcp:// address of the router of a running mesh"
    )
    add_upstream(found)
    found.add_argument(
        "-n", dest="num_samples", type=int, help=f"rollouts per task (default: {NUM_SAMPLES})"
    )
    found.add_argument(
        "--num-tasks", type=int, help=f"maximum number of tasks (default: {NUM_TASKS})"
    )
    found.add_argument("--split", help=f"split of the environment's tasks (default: {SPLIT})")
    found.add_argument(
        "--pass-threshold",
        type=float,
        metavar="REWARD",
        help="minimum reward of a success, for environments that do not report success and whose "
        "rewards are not 0 or 1 (default: pass_threshold of --config)",
    )
    found.add_argument(
        "--out", type=Path, default=FOLDER, help=f"folder for results (default: {FOLDER})"
    )
    found.add_argument("--resume", action="store_true", help="resume the evaluation in --out")
    found.add_argument("--json", action="store_true", help="print the report as JSON")
    found.add_argument("--config", type=Path, help="mesh.toml with all other settings")
    add_set(found)
    add_run(found)
    add_no_keys(found)
    return found


def options_of(options: argparse.Namespace) -> EvalOptions:
    """Validate the arguments and merge them with the settings; UserError in one line."""
    if options.router and (options.engines or options.model_dir):
        raise UserError(
            "--router: excludes --engine and --model-dir, which that mesh has; leave them out"
        )
    if options.base_url and (options.router or options.engines or options.model_dir):
        raise UserError("--base-url: excludes --router, --engine and --model-dir; leave them out")
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
    set_model(options)
    config = config_of(options, SETTINGS | model_defaults(options))
    plan = EvaluationPlan(
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
    return EvalOptions(
        plan=plan,
        config=config,
        folder=options.out,
        router=options.router,
        upstream=upstream,
        run=options.run,
        has_keys=options.has_keys,
        resume=options.resume,
        as_json=options.json,
    )


def check_plan(plan: EvaluationPlan, stored: EvaluationPlan | None, folder: Path) -> None:
    """Raise UserError if the plan is empty, or differs from the one in the folder."""
    for name, number in (("-n", plan.num_samples), ("--num-tasks", plan.num_tasks)):
        if number < 1:
            raise UserError(f"{name} {number}: must be at least 1")
    for field in EvaluationPlan.__struct_fields__ if stored else ():
        new, old = getattr(plan, field), getattr(stored, field)
        if new != old:
            raise UserError(
                f"{folder} evaluates with {field} = {_json(old)}, not {_json(new)}; "
                "leave that option out, or start again without --resume"
            )


def open_folder(request: EvalOptions) -> None:
    """Create the folder, moving an older evaluation aside, or keep the one that is resumed."""
    try:
        if not request.resume:
            move_aside(request.folder)
        make_folder(request.folder, request.config.run.mode)
    except OSError as error:
        raise UserError(f"{request.folder}: {error.strerror}; name another --out") from None
    if request.resume:
        return
    write_plan(request.plan, request.folder)
    write_config(request.config, request.folder / CONFIG)


async def evaluate_on_mesh(request: EvalOptions, tasks: list[Task]) -> RunEnd:
    """Run the missing rollouts on a mesh; return how it ended."""
    # numpy comes with the client, and stays out of the other verbs.
    from rollmesh.serve.client.evaluation import Site, evaluate  # noqa: PLC0415 - see above

    # A mistake that can be detected early moves no older evaluation aside.
    if not request.router:
        await check(mesh_config(request), makes_model=False)
    open_folder(request)
    async with AsyncExitStack() as stack:
        shown = stack.enter_context(progress(request.plan, len(tasks), status_of(request)))
        router, keys, stop = await _enter_mesh(request, stack)
        if stop.done():
            return stop.result()
        site = Site(router, request.folder, request.config.journal, keys)
        evaluating = evaluate(request.plan, tasks, site, shown.on_rows, shown.set_wait_reason)
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


async def evaluate_upstream(request: EvalOptions, env: Env, tasks: list[Task]) -> RunEnd:
    """Run the missing rollouts in this process, against request.upstream; return how it ended."""
    # numpy and the runtime come with these, and stay out of the other verbs.
    from rollmesh.cli.local_client import LocalClient, LocalRollouts  # noqa: PLC0415 - see above
    from rollmesh.serve.client.evaluation import evaluate_locally  # noqa: PLC0415 - see above

    assert request.upstream
    open_folder(request)
    with relay(request.upstream) as gateway:
        settings = request.config.worker
        isolate_programs(settings, forward_to(gateway.url))
        rollouts = LocalRollouts(env, gateway, request.upstream.model, settings, is_relay=True)
        client = LocalClient(rollouts)
        stop = asyncio.create_task(_stopped(), name="stop")
        with progress(request.plan, len(tasks), request.upstream.base_url) as shown:
            shown.set_wait_reason(lambda: "the started rollouts are still running")
            work = asyncio.create_task(
                evaluate_locally(client, request.plan, tasks, request.folder, shown.on_rows)
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
    request: EvalOptions, stack: AsyncExitStack
) -> tuple[str, Keys | None, asyncio.Task[RunEnd]]:
    """Return the router's address, the keys for it, and a task that ends when the evaluation
    must.
    """
    if request.router:
        keys = find_keys(request.router, Role.CLIENT, request.run)
        check_admitted(request.router, keys)
        stop = asyncio.create_task(_stopped(), name="stop")
        stack.callback(stop.cancel)
        return request.router, keys, stop
    started = ServingMesh(mesh_config(request), resume_command(request), has_keys=request.has_keys)
    mesh = await stack.enter_async_context(started)
    keys = keys_of(mesh.keys, Role.CLIENT)
    return "" if mesh.end.done() else mesh.router, keys, mesh.end


async def _stopped() -> RunEnd:
    await stop_event(asyncio.get_running_loop()).wait()
    return RunEnd(INTERRUPTED, "stopped")


def mesh_config(request: EvalOptions) -> Config:
    """Return the small mesh's settings; its run folder is inside the evaluation's."""
    if not request.config.model.path:
        raise UserError("--model-dir is missing: the folder with the model's tokenizer and weights")
    run = msgspec.structs.replace(request.config.run, folder=str(request.folder), name=EVAL_MESH)
    return msgspec.structs.replace(request.config, run=run)


def status_of(request: EvalOptions) -> str:
    """Return the name of the status that shows more about the mesh."""
    return "the status of its mesh" if request.router else f"`rollmesh status {request.folder}`"


def conclude(request: EvalOptions, end: RunEnd) -> int:
    """Report the result and return the exit code; UserError if the mesh could not work."""
    if end.code == USAGE:
        raise UserError(end.reason)
    rows = rows_in(request.folder)
    report = report_of(rows, request.config.pass_threshold)
    if end.code == OK or report.num_rollouts:
        show(request.plan, report, request.folder, as_json=request.as_json)
    if end.code != OK:
        print(f"{end.reason}; `{resume_command(request)}` resumes it", file=sys.stderr)
        return end.code
    if complaint := all_failed(rows, report):
        print(f"rollmesh: {complaint}", file=sys.stderr)
        return FAILED
    return OK


def resume_command(request: EvalOptions) -> str:
    """Return the command that resumes the evaluation."""
    words = ["rollmesh", "eval", "--resume", "--out", str(request.folder)]
    words += ["--router", request.router] if request.router else []
    if request.upstream:
        words += ["--base-url", request.upstream.base_url, "--model", request.upstream.model]
    return shlex.join(words)


def all_failed(rows: Sequence[Row], report: Report) -> str:
    """Return a line for the user if every rollout failed, or there is none; else ''."""
    if any(row.outcome in TRAINED_OUTCOMES for row in rows):
        return ""
    if not rows:
        return "the evaluation has no rollouts"
    cause, failure = next(iter(report.failures.items()))
    error = next(iter(failure.errors), "")
    return f"every rollout failed ({len(rows):,}), most with {cause}{error and f': {error}'}"


def _model_of(
    options: argparse.Namespace, config: Config, upstream: ThirdPartyEndpoint | None
) -> str:
    """Return the plan's name for the model; '' for that of a running mesh."""
    if upstream:
        return f"{upstream.model} at {upstream.base_url}"
    return "" if options.router else config.model.path


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
