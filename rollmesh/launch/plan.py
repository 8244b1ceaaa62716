"""Which processes a run needs, how each is called, and what it waits for.

Owns the argv of every room. Invariants: pure, from settings to a list; another process's address
is written `{role}` and filled in when it is known. Driven by `run` and the supervisor.

    warm-start ==gate==> engine-0 (its socket is ours, so its address is known before it serves)
               ==gate==> worker-0, worker-1, trainer <--needs-- router
                                             trainer <--gate-- coordinator <--needs-- router
    dashboard

The coordinator is there where engines stand on GPUs that other runs share: until it has put them to
sleep nobody asks anything of them.
"""

import enum
import sys
from pathlib import Path

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.share import Share, token_file
from rollmesh.launch.earlier import Earlier, weights_of


class OnDeath(enum.Enum):
    """What the end of a process means to the run."""

    END = "end"
    """The run cannot go on."""
    RESTART = "restart"
    """It is started again, with back-off; in a crash loop the run ends."""
    REPLACE = "replace"
    """The same, but with exit code 0 it left for good, and with RECYCLED it wants a successor."""
    GIVE_UP = "give_up"
    """It is started again, with back-off; in a crash loop the run goes on without it."""
    FINISH = "finish"
    """With exit code 0 the run has reached its goal; else it is started again, with back-off, and
    goes on from what it wrote down. In a crash loop the run ends."""
    NEXT = "next"
    """With exit code 0 it is done, and those that wait for it start."""


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process."""

    role: str
    argv: tuple[str, ...]
    """The program and its words; launch adds --ready-fd and --listen-fd."""
    again: tuple[str, ...] = ()
    """More words, where it is not the first process of its role."""
    on_death: OnDeath
    needs: tuple[str, ...] = ()
    """Roles that must be ready, or done, before it is started."""
    gate: tuple[str, ...] = ()
    """Roles that must be ready, or done, before it may do more than load its libraries."""
    bind: str = ""
    """host:port of the listening socket that launch opens for it; '' for none."""
    bind_key: str = ""
    """The setting that `bind` stands in, for people."""
    loads: str = ""
    """The name of the thing it loads before it reports, for the line about a crash in that load."""
    key: str = ""
    """Role of the key that it gets; '' for none."""
    is_worker: bool = False
    """Whether the router knows it by its role, and is told of its end."""

    @property
    def reports(self) -> bool:
        """Whether it says when it serves; otherwise its end is awaited."""
        return self.on_death is not OnDeath.NEXT


MODEL_ROLE = "warm-start"
COORDINATOR = "coordinator"
ROLLMESH = (sys.executable, "-m", "rollmesh.cli.main")
LEAST_VERSION = ("--least-version", "1")
"""Of a run that is gone on with: weights that were never published sample nothing for it."""
ASLEEP = ("--asleep",)
"""Of a run on a shared fleet, whose engines serve when its coordinator has woken them."""


def plan_mesh(
    config: Config,
    config_path: Path,
    make_model: tuple[str, ...] = (),
    earlier: Earlier | None = None,
    share: Share | None = None,
) -> list[ChildPlan]:
    """The processes of a run; `make_model` is the verb that writes the model first, if any.

    `earlier` is what there is of a run that is gone on with, `share` of whose GPUs it has a part.
    """
    model_first = (MODEL_ROLE,) if make_model else ()
    plans = []
    if make_model:
        plans.append(
            ChildPlan(role=MODEL_ROLE, argv=(*ROLLMESH, *make_model), on_death=OnDeath.NEXT)
        )
    settings = ("--config", str(config_path))
    words = (*(LEAST_VERSION if earlier else ()), *(ASLEEP if share else ()))
    plans += plan_serving(config, settings, model_first, words, earlier, share)
    plans += [plan_coordinator(config, settings, share)] if share else []
    plans.append(
        ChildPlan(
            role="trainer",
            argv=(*ROLLMESH, "train", *settings, "--router", "{router}", *share_words(share)),
            key="publisher",
            on_death=OnDeath.FINISH,
            needs=("router",),
            gate=(*model_first, *([COORDINATOR] if share else [])),
        )
    )
    if config.dashboard.enabled:
        plans.append(plan_dashboard(config))
    return plans


def plan_serving(
    config: Config,
    settings: tuple[str, ...],
    gate: tuple[str, ...] = (),
    router_words: tuple[str, ...] = (),
    earlier: Earlier | None = None,
    share: Share | None = None,
) -> list[ChildPlan]:
    """What rolls out: engines where none are named, a router and workers."""
    engines = [] if config.engine.urls else plan_engines(config, gate, earlier, share)
    workers = [
        plan_worker(config, settings, f"worker-{number}", gate)
        for number in range(config.worker.num_workers)
    ]
    return [*engines, plan_router(config, (*settings, *router_words)), *workers]


def plan_engines(
    config: Config,
    gate: tuple[str, ...],
    earlier: Earlier | None = None,
    share: Share | None = None,
) -> list[ChildPlan]:
    """The embedded engines. One that was started again begins with the newest weights that there
    are by then, whether or not the trainer lives; the publisher brings it further.

    Those of an earlier run begin with its newest weights: they roll out while the trainer recovers.
    On a shared fleet all begin without memory, until a coordinator wakes them.
    """
    engine, untrained = config.engine, weights_words(config.model.path, 0)
    first = weights_words(str(earlier.weights), earlier.policy_version) if earlier else untrained
    argv = [*ROLLMESH, "engine", *first]
    argv += ["--incremental-streaming-output", "--skip-tokenizer-init"]
    argv += ASLEEP if share else ()
    argv += ["--max-running-requests", str(engine.max_running)]
    argv += ["--max-total-tokens", str(engine.kv_tokens)]
    argv += ["--num-threads", str(engine.num_threads)]
    argv += ["--random-seed", str(config.run.seed), "--run-folder", str(config.run_folder())]
    return [
        ChildPlan(
            role=role,
            argv=(*argv, "--role", role),
            # The weights of an earlier run may be gone by then.
            again=(*untrained, "--newest-of", str(weights_of(config))),
            on_death=OnDeath.RESTART,
            gate=gate,
            bind="127.0.0.1:0",
        )
        for role in engine_roles(config)
    ]


def engine_roles(config: Config) -> list[str]:
    """Those of the engines that are ours to start."""
    return [f"engine-{number}" for number in range(config.engine.num_embedded)]


def engine_words(config: Config) -> tuple[str, ...]:
    """`--engine` for each engine of the mesh, in one order: a user's, or else ours."""
    urls = config.engine.urls or [f"{{{role}}}" for role in engine_roles(config)]
    return tuple(word for url in urls for word in ("--engine", url))


def weights_words(folder: str, policy_version: int) -> tuple[str, ...]:
    """What an engine begins with."""
    return ("--model-dir", folder, "--weight-version", str(policy_version))


def plan_router(config: Config, settings: tuple[str, ...]) -> ChildPlan:
    """The router, which is told where the engines are before they are up.

    The next one listens where the last one did; peers dial again and say what they hold.
    """
    return ChildPlan(
        role="router",
        argv=(*ROLLMESH, "router", *settings, *engine_words(config)),
        key="hub",
        again=("--bind", "{router}"),
        on_death=OnDeath.RESTART,
        bind=config.router.http_bind,
        bind_key="router.http_bind",
    )


def plan_coordinator(config: Config, settings: tuple[str, ...], share: Share) -> ChildPlan:
    """Who wakes engines and puts them to sleep, as the scheduler says; what is awake when it dies
    stays so, and the next one finds out."""
    words = (*settings, *share_words(share), "--router", "{router}", *engine_words(config))
    return ChildPlan(
        role=COORDINATOR,
        argv=(*ROLLMESH, "coordinator", *words, "--weights", str(weights_of(config))),
        key="publisher",
        on_death=OnDeath.RESTART,
        needs=("router",),
    )


def share_words(share: Share | None) -> tuple[str, ...]:
    """The options that name it to a process."""
    if share is None:
        return ()
    file = token_file(share.pipeline_id, share.token_file)
    words = ("--pipeline-token", str(file.absolute())) if file else ()
    return ("--scheduler", share.scheduler, "--pipeline", share.pipeline_id, *words)


def plan_worker(
    config: Config, settings: tuple[str, ...], role: str, gate: tuple[str, ...]
) -> ChildPlan:
    """One worker; its endpoint's port outlives it, so agents of the next one may keep it."""
    return ChildPlan(
        role=role,
        argv=(*ROLLMESH, "worker", *settings, "--router", "{router}", "--worker-id", role),
        key="worker",
        is_worker=True,
        loads=f"env = {config.env}",
        on_death=OnDeath.REPLACE,
        needs=("router",),
        gate=gate,
        bind=config.interception.bind,
        bind_key="interception.bind",
    )


def plan_dashboard(config: Config) -> ChildPlan:
    """The page; a run goes on without it."""
    return ChildPlan(
        role="dashboard",
        argv=(*ROLLMESH, "dashboard", str(config.run_folder())),
        on_death=OnDeath.GIVE_UP,
        bind=config.dashboard.bind,
        bind_key="dashboard.bind",
    )


def fill(argv: tuple[str, ...], addresses: dict[str, str]) -> list[str]:
    """`argv` with `{role}` replaced by that role's address."""
    filled = []
    for word in argv:
        if word.startswith("{") and word.endswith("}"):
            word = addresses[word[1:-1]]
        filled.append(word)
    return filled
