"""The processes of a run: how each is started, and what it waits for.

- Pure: settings in, a list out. The address of another process is written `{role}` and filled in
  when it is known.
- Published weights are named by their policy version, which the trainer records before their folder
  exists.

    warm-start ==gate==> engine-0 (its socket is ours, so its address is known before it serves)
               ==gate==> worker-0, worker-1, trainer <--needs-- router
                                             trainer <--gate-- coordinator <--needs-- router
    dashboard

A run has a coordinator if its engines are on GPUs that other runs share; nothing uses the engines
before it has put them to sleep.
"""

import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rollmesh.core import model_folders
from rollmesh.core.addresses import is_loopback
from rollmesh.core.config import Config
from rollmesh.core.share import Share, token_file
from rollmesh.launch.folder import config_path


class StartWeights(msgspec.Struct, frozen=True):
    """The weights with which the engines of a resumed run start."""

    weights: Path
    """The newest published weights; without any, the model that the run began with."""
    policy_version: int = 0
    """The policy version of `weights`; 0 for the model."""


def start_weights(config: Config) -> StartWeights:
    """Return the newest weights of the run's folder, or its model."""
    return newest_published(weights_of(config)) or StartWeights(Path(config.model.path))


def weights_of(config: Config) -> Path:
    """Return the folder to which the run's trainer publishes."""
    return config.run_folder() / "weights"


def newest_published(weights: Path) -> StartWeights | None:
    """Return the newest complete model in the folder `weights` of a run; None if there is none."""
    newest = model_folders.newest_published(weights)
    return StartWeights(newest.folder, newest.policy_version) if newest else None


class OnDeath(enum.Enum):
    """The consequence of a process's end for the run."""

    END = "end"
    """The run ends."""
    RESTART = "restart"
    """Restart with back-off; in a crash loop the run ends."""
    REPLACE = "replace"
    """Like RESTART, but after exit code 0 it is not restarted, and after RECYCLED it is at once."""
    CONTINUE = "give_up"
    """Restart with back-off; in a crash loop the run continues without it."""
    FINISH = "finish"
    """After exit code 0 the run is done; else it is restarted with back-off and resumes from its
    files. In a crash loop the run ends.
    """
    NEXT = "next"
    """After exit code 0 it is done, and the processes that wait for it start."""


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one process is started and supervised."""

    role: str
    argv: tuple[str, ...]
    """The program and its arguments; launch adds --ready-fd and --listen-fd."""
    again: tuple[str, ...] = ()
    """More arguments, if it is not the first process of its role."""
    on_death: OnDeath
    needs: tuple[str, ...] = ()
    """Roles that must be ready, or done, before it is started."""
    gate: tuple[str, ...] = ()
    """Roles that must be ready, or done, before it may do more than load its libraries."""
    bind: str = ""
    """host:port of the listening socket that launch opens for it; '' for none."""
    bind_key: str = ""
    """The config key of `bind`, for error messages."""
    listens: bool = True
    """Whether launch listens on the socket; otherwise it only reserves the port."""
    loads: str = ""
    """Name of its load before it is ready, for the message about a crash during the load."""
    key: str = ""
    """Role of the key that it gets; '' for none."""
    num_gpus: int = 0
    """GPUs of its own."""
    num_cpus: float = 1
    """CPUs that a cluster's scheduler counts for it."""
    uses_engines: bool = True
    """Whether it gets the engines' API key, if there is one."""
    stays_here: bool = False
    """Whether it runs on launch's machine, wherever the others run."""
    variables: dict[str, str] = {}
    """Added to its environment."""
    ready_timeout_s: float = 0.0
    """Seconds in which it must report that it is ready; 0: launch.ready_timeout_s."""
    key_name: str = ""
    """Name of that key's file; '' for the role."""
    is_rank: bool = False
    """Whether it is a rank of the trainer: it ends with the trainer and joins the next one."""
    is_engine: bool = False
    """Whether it is an engine: the router gets its address, and its new one if that changes."""
    is_worker: bool = False
    """Whether it is a worker: the router knows it by its role, and its end is reported to the
    router.
    """

    @property
    def reports(self) -> bool:
        """Whether it reports that it is ready; otherwise launch waits for its exit."""
        return self.on_death is not OnDeath.NEXT


MODEL_ROLE = "warm-start"
COORDINATOR = "coordinator"
TRAINER = "trainer"
ROLLMESH = (sys.executable, "-m", "rollmesh.cli.main")
LEAST_VERSION = ("--least-version", "1")
"""For a resumed run: weights that were never published sample nothing for it."""
READY_MARGIN_S = 60.0
"""Seconds for a process that watches a load to report that this has taken too long."""
ENGINE_CHANGES = "engines.json"
"""File of a run's folder that keeps the engines which the operator added and removed."""
ASLEEP = ("--asleep",)
"""For a run on a shared fleet, whose engines serve once its coordinator has woken them."""


def plan_mesh(
    config: Config,
    settings_path: Path,
    make_model: tuple[str, ...] = (),
    resumed: StartWeights | None = None,
    share: Share | None = None,
) -> list[ChildPlan]:
    """Return the processes of a run; `make_model` is the verb that writes the model first, if any.

    `resumed` is set for a resumed run, `share` for one that shares its GPUs.
    """
    model_first = (MODEL_ROLE,) if make_model else ()
    plans = []
    if make_model:
        plans.append(
            ChildPlan(
                role=MODEL_ROLE,
                argv=(*ROLLMESH, *make_model),
                on_death=OnDeath.NEXT,
                uses_engines=False,
                stays_here=True,
            )
        )
    settings = ("--config", str(settings_path))
    options = (*(LEAST_VERSION if resumed else ()), *(ASLEEP if share else ()))
    plans += plan_serving(config, settings, model_first, options, resumed, share)
    plans += [plan_coordinator(config, settings, share)] if share else []
    plans.append(
        ChildPlan(
            role=TRAINER,
            argv=(*ROLLMESH, "train", *settings, "--router", "{router}", *share_options(share)),
            key="publisher",
            on_death=OnDeath.FINISH,
            needs=("router",),
            gate=(*model_first, *([COORDINATOR] if share else []), *_loading(config)),
        )
    )
    if config.dashboard.enabled:
        plans.append(plan_dashboard(config))
    return plans


def plan_serving(
    config: Config,
    settings: tuple[str, ...],
    gate: tuple[str, ...] = (),
    router_options: tuple[str, ...] = (),
    resumed: StartWeights | None = None,
    share: Share | None = None,
) -> list[ChildPlan]:
    """Return the processes that roll out: engines, if no URLs are configured, a router and
    workers.
    """
    engines = plan_engines(config, settings, gate, resumed, share)
    workers = [
        plan_worker(config, settings, f"worker-{number}", gate)
        for number in range(config.worker.num_workers)
    ]
    return [*engines, plan_router(config, (*settings, *router_options)), *workers]


def plan_engines(
    config: Config,
    settings: tuple[str, ...],
    gate: tuple[str, ...],
    resumed: StartWeights | None = None,
    share: Share | None = None,
) -> list[ChildPlan]:
    """Return the engines that launch starts: embedded ones, or SGLang servers.

    - A restarted engine loads the newest published weights, whether or not the trainer runs; the
      publisher updates it from there.
    - Engines of a resumed run start with its newest weights: they roll out while the trainer
      recovers.
    - On a shared fleet all start asleep, until a coordinator wakes them.
    """
    untrained = weights_options(config.model.path, 0)
    first = weights_options(str(resumed.weights), resumed.policy_version) if resumed else untrained
    is_sglang = config.engine.launch == "sglang"
    start = ("sglang", *settings) if is_sglang else embedded_options(config)
    plans = [
        ChildPlan(
            role=role,
            argv=(*ROLLMESH, "engine", *start, *first, *(ASLEEP if share else ()), "--role", role),
            # The weights of the resumed run may be gone by then.
            again=(*untrained, "--newest-of", str(weights_of(config))),
            on_death=OnDeath.RESTART,
            gate=gate,
            bind="127.0.0.1:0",
            is_engine=True,
        )
        for role in engine_roles(config)
    ]
    return [of_sglang(config, plan) for plan in plans] if is_sglang else plans


def embedded_options(config: Config) -> tuple[str, ...]:
    """Return the options of an embedded engine, besides its weights and role."""
    engine = config.engine
    options = ["--incremental-streaming-output", "--skip-tokenizer-init"]
    options += ["--max-running-requests", str(engine.max_running)]
    options += ["--max-total-tokens", str(engine.kv_tokens)]
    options += ["--num-threads", str(engine.num_threads)]
    options += ["--random-seed", str(config.run.seed), "--run-folder", str(config.run_folder())]
    return tuple(options)


def of_sglang(config: Config, plan: ChildPlan) -> ChildPlan:
    """Return the plan of the process that starts and watches one SGLang server.

    Its port is reserved, because SGLang cannot inherit a socket: peers know the address before the
    server is up, and a restarted one has the same.
    """
    return msgspec.structs.replace(
        plan,
        listens=False,
        num_gpus=config.engine.gpus_each,
        ready_timeout_s=config.engine.load_timeout_s + READY_MARGIN_S,
    )


def engine_roles(config: Config) -> list[str]:
    """Return the roles of the engines that launch starts."""
    return [f"engine-{number}" for number in range(config.engine.num_launched)]


def _loading(config: Config) -> list[str]:
    """Return the roles whose loads may take longer than a trainer waits for engines."""
    return engine_roles(config) if config.engine.launch == "sglang" else []


def engine_options(config: Config) -> tuple[str, ...]:
    """Return `--engine` for each engine of the mesh: the configured URLs, or else our engines."""
    urls = config.engine.urls or [f"{{{role}}}" for role in engine_roles(config)]
    return tuple(word for url in urls for word in ("--engine", url))


def weights_options(folder: str, policy_version: int) -> tuple[str, ...]:
    """Return the options for an engine's first weights."""
    return ("--model-dir", folder, "--weight-version", str(policy_version))


def plan_router(config: Config, settings: tuple[str, ...]) -> ChildPlan:
    """Return the router, which gets the engines' addresses before they are up.

    A restarted router listens on the same address; its peers reconnect and report their state. It
    has the engines that the operator added, also after the run was resumed.
    """
    changes = ("--engine-changes", str(config.run_folder() / ENGINE_CHANGES))
    return ChildPlan(
        role="router",
        argv=(*ROLLMESH, "router", *settings, *changes, *engine_options(config)),
        key="hub",
        again=("--known-as", "{router}"),
        on_death=OnDeath.RESTART,
        stays_here=True,
        bind=config.router.http_bind,
        bind_key="router.http_bind",
    )


def plan_coordinator(config: Config, settings: tuple[str, ...], share: Share) -> ChildPlan:
    """Return the coordinator, which wakes engines and puts them to sleep on the scheduler's grants.

    Engines that are awake when it dies stay awake, and its successor finds them.
    """
    options = (*settings, *share_options(share), "--router", "{router}", *engine_options(config))
    return ChildPlan(
        role=COORDINATOR,
        argv=(*ROLLMESH, "coordinator", *options, "--weights", str(weights_of(config))),
        key="publisher",
        on_death=OnDeath.RESTART,
        needs=("router",),
        stays_here=True,
    )


def share_options(share: Share | None) -> tuple[str, ...]:
    """Return the options that name the share to a process."""
    if share is None:
        return ()
    file = token_file(share.pipeline_id, share.token_file)
    options = ("--pipeline-token", str(file.absolute())) if file else ()
    return ("--scheduler", share.scheduler, "--pipeline", share.pipeline_id, *options)


def plan_worker(
    config: Config, settings: tuple[str, ...], role: str, gate: tuple[str, ...]
) -> ChildPlan:
    """Return one worker; its endpoint's port outlives it, so that agents can use the next
    worker.
    """
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
    """Return the dashboard; a run continues without it."""
    return ChildPlan(
        role="dashboard",
        argv=(
            *ROLLMESH,
            "dashboard",
            str(config.run_folder()),
            "--poll-s",
            str(config.dashboard.poll_s),
        ),
        on_death=OnDeath.CONTINUE,
        uses_engines=False,
        stays_here=True,
        bind=config.dashboard.bind,
        bind_key="dashboard.bind",
    )


def on_network(config: Config) -> Config:
    """Return the settings of a run whose processes are on several nodes: with absolute paths."""
    run, model = config.run, config.model
    run = msgspec.structs.replace(run, folder=str(Path(run.folder).absolute()))
    if Path(model.path).is_dir():
        model = msgspec.structs.replace(model, path=str(Path(model.path).absolute()))
    return msgspec.structs.replace(config, run=run, model=model)


def with_router_on(address: str, config: Config, plans: Sequence[ChildPlan]) -> list[ChildPlan]:
    """Return the plans with a router that listens on `address`, this node's, unless the user has
    bound it elsewhere.

    The settings keep what the user wrote: a resumed run may have its router on another node.
    """
    bind = config.router.bind
    if not is_loopback(urlsplit(bind).hostname or ""):
        return list(plans)
    words = ("--bind", f"tcp://{address}:{bind.rpartition(':')[2]}")
    return [
        msgspec.structs.replace(plan, argv=(*plan.argv, *words)) if plan.role == "router" else plan
        for plan in plans
    ]


def with_local_ranks(config: Config, largest_gpus: int, num_local: int = 1) -> Config:
    """Return the settings with `num_local` ranks on the trainer's node if no node has a GPU for
    each rank of the trainer.

    `largest_gpus` is the largest number of GPUs of a node, 0 if the ranks are on CPUs.
    """
    trainer = config.trainer
    is_spread = trainer.device != "cpu" and 0 < largest_gpus < trainer.num_ranks
    if trainer.num_local_ranks or not is_spread:
        return config
    trainer = msgspec.structs.replace(trainer, num_local_ranks=num_local)
    return msgspec.structs.replace(config, trainer=trainer)


def for_cluster(config: Config, plans: list[ChildPlan], num_gpus: int) -> list[ChildPlan]:
    """Return the plans with what each process needs of a node, and those of the trainer's ranks
    that have a place of their own; the cluster has `num_gpus` GPUs.
    """
    found, settings, trainer = [], config.ray, config.trainer
    is_on_gpu = trainer.device != "cpu" and num_gpus > 0
    for plan in plans:
        if plan.is_worker:
            plan = msgspec.structs.replace(plan, num_cpus=settings.worker_cpus)
        elif plan.is_engine:
            plan = msgspec.structs.replace(plan, num_cpus=settings.engine_cpus, bind="{host}:0")
        elif plan.role == TRAINER:
            needed = settings.trainer_gpus or trainer.local_ranks * is_on_gpu
            cpus = settings.trainer_cpus
            plan = msgspec.structs.replace(plan, num_cpus=cpus, num_gpus=needed)
        found.append(plan)
    return with_ranks(config, found, "{host}", int(is_on_gpu))


def with_ranks(
    config: Config, plans: list[ChildPlan], host: str, num_gpus: int, *, share_nodes: bool = False
) -> list[ChildPlan]:
    """Return the plans with those of the trainer's ranks that have a place of their own.

    The trainer waits for them at `host`. Each has `num_gpus` GPUs of its own, or with `share_nodes`
    sees those of its node, on which there are as many ranks as on the trainer's.
    """
    trainer = config.trainer
    if trainer.local_ranks == trainer.num_ranks:
        return plans
    found = [
        msgspec.structs.replace(plan, bind=f"{host}:0", listens=False)
        if plan.role == TRAINER
        else plan
        for plan in plans
    ]
    for number in range(trainer.local_ranks, trainer.num_ranks):
        local_rank = number % trainer.local_ranks if share_nodes else 0
        found.append(plan_rank(config, number, num_gpus, local_rank))
    return found


def plan_rank(config: Config, number: int, num_gpus: int, local_rank: int) -> ChildPlan:
    """Return a rank of the trainer that has a place of its own; it dials the trainer's address."""
    settings = ("--config", str(config_path(config)))
    words = ("--rank", str(number), "--controller", f"{{{TRAINER}:bind}}")
    local = ("--local-rank", str(local_rank)) if local_rank else ()
    return ChildPlan(
        role=f"rank-{number}",
        argv=(*ROLLMESH, "rank", *settings, *words, *local),
        key="publisher",
        key_name=TRAINER,
        is_rank=True,
        on_death=OnDeath.RESTART,
        uses_engines=False,
        num_gpus=num_gpus,
        num_cpus=config.ray.trainer_cpus,
    )


def roles_in(argv: tuple[str, ...]) -> list[str]:
    """Return the roles whose addresses `argv` names as `{role}` or `{role:bind}`."""
    return [name.partition(":")[0] for name in names_in(argv)]


def names_in(argv: tuple[str, ...]) -> list[str]:
    """Return what `argv` names in braces, `{host}` excepted."""
    words = [word[1:-1] for word in argv if word.startswith("{") and word.endswith("}")]
    return [word for word in words if word != "host"]


def fill(argv: tuple[str, ...], addresses: dict[str, str]) -> tuple[str, ...]:
    """Return `argv` with each `{role}` replaced by that role's address."""
    named = {f"{{{name}}}": addresses[name] for name in names_in(argv)}
    return tuple(named.get(word, word) for word in argv)
