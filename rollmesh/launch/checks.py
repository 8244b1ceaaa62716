"""Checks that run before anything starts, so that a mistake costs a second and not a minute.

- An error names the setting, its value and the remedy.
- Nothing is written or started.
"""

import asyncio
from collections.abc import Callable

from aiohttp import ClientError, ClientSession, ClientTimeout, InvalidURL

from rollmesh.core.addresses import is_loopback
from rollmesh.core.child_process import spawn_options
from rollmesh.core.config import Config
from rollmesh.core.descriptors import PER_CHILD, PER_ROLLOUT, allow_descriptors
from rollmesh.core.errors import AddressError, ConfigError, ModelError
from rollmesh.core.model_folders import EXAMPLE, why_no_model
from rollmesh.core.secret_files import ENGINE_KEY_FILE_VARIABLE, engine_key
from rollmesh.core.share import Share
from rollmesh.launch.pipeline import check_share

_FIND_SGLANG = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
NUM_OTHERS = 5
"""The warm start, router, coordinator, trainer and dashboard."""


UNAUTHORIZED = 401


async def check(
    config: Config,
    makes_model: bool,
    share: Share | None = None,
    report: Callable[[str], object] = str,
    *,
    is_local: bool = True,
) -> None:
    """Raise UserError if the run cannot work; `report` gets a line about each wait.

    `is_local` is False for a run whose engines are started on other machines.
    """
    check_descriptors(config)
    check_page(config.dashboard.bind)
    if not makes_model:
        check_model(config.model.path)
    if share:
        num_engines = len(config.engine.urls) or config.engine.num_launched
        check_share(share, num_engines, config.launch, report)
    if config.engine.launch == "sglang" and is_local:
        await check_python(config)
    if config.engine.urls:
        timeout_s = config.launch.engine_check_timeout_s
        headers = {"Authorization": f"Bearer {key}"} if (key := engine_key()) else {}
        timeout = ClientTimeout(total=timeout_s)
        async with ClientSession(headers=headers, timeout=timeout) as session:
            for url in config.engine.urls:
                await check_engine(session, url, timeout_s)


async def check_python(config: Config) -> None:
    """Raise ConfigError if the servers' Python cannot be run or has no SGLang."""
    python = config.engine.server_python
    name = f"engine.python = {python}"
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _FIND_SGLANG, **spawn_options(stderr=asyncio.subprocess.DEVNULL)
        )
    except OSError as error:
        raise ConfigError(f"{name}: {str(error.strerror).lower()}; name a Python") from None
    if await process.wait():
        raise ConfigError(
            f"{name}: it has no package sglang; name the Python of an environment that has it: "
            "python3 -m venv sglang && sglang/bin/pip install sglang, then sglang/bin/python"
        )


def check_descriptors(config: Config) -> None:
    """Raise ConfigError if the run's processes could not open all the files that they need."""
    num_rollouts = config.worker.max_rollouts
    allow_descriptors(PER_ROLLOUT * num_rollouts, f"worker.max_rollouts = {num_rollouts}")
    num_children = config.worker.num_workers + config.engine.num_launched + NUM_OTHERS
    allow_descriptors(PER_CHILD * num_children, f"a run of {num_children} processes")


def check_page(bind: str) -> None:
    """Raise AddressError if other machines could reach the dashboard, which has no login."""
    host = bind.rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return
    raise AddressError(
        f"dashboard.bind = {bind}: the dashboard has no login; bind 127.0.0.1:PORT and reach it "
        "through `ssh -L`"
    )


def check_model(path: str) -> None:
    """Raise ModelError if `path` is not a model folder."""
    if not path:
        raise ModelError(
            "model.path is not set; name a model folder in Hugging Face layout, or the id of a "
            f"downloaded model of the Hub: --set model.path=DIR; {EXAMPLE}"
        )
    if why := why_no_model(path):
        raise ModelError(f"model.path = {path}: {why}")


async def check_engine(session: ClientSession, url: str, timeout_s: float) -> None:
    """Raise AddressError if no engine answers at `url`."""
    try:
        async with session.get(f"{url.rstrip('/')}/model_info") as reply:
            status = reply.status
    except InvalidURL:
        raise AddressError(
            f"engine.urls: {url} is not an address; write http://HOST:PORT"
        ) from None
    except (ClientError, TimeoutError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise AddressError(
            f"engine.urls: {url} does not answer ({why}); start SGLang there"
        ) from None
    if status == UNAUTHORIZED:
        raise AddressError(
            f"engine.urls: {url} refuses our API key; set {ENGINE_KEY_FILE_VARIABLE} to a file "
            "with the engine's"
        )
    if status != 200:
        raise AddressError(
            f"engine.urls: {url} is not an SGLang server: /model_info returned status {status}"
        )
