"""What is checked before anything starts, so that a mistake costs a second and not a minute.

Invariant: a complaint names the setting, what stands there and what to do; nothing is written or
started meanwhile. Driven by `run`.
"""

from collections.abc import Callable

from aiohttp import ClientError, ClientSession, ClientTimeout, InvalidURL

from rollmesh.core.config import Config
from rollmesh.core.descriptors import PER_CHILD, PER_ROLLOUT, allow_descriptors
from rollmesh.core.errors import AddressError, ModelError
from rollmesh.core.loopback import is_loopback
from rollmesh.core.model_folder import EXAMPLE, why_no_model
from rollmesh.core.share import Share, check_may_share
from rollmesh.launch.share import check_share

ANSWER_S = 5.0
NUM_OTHERS = 5
"""Warm start, router, coordinator, trainer, page."""


async def check(
    config: Config,
    makes_model: bool,
    share: Share | None = None,
    say: Callable[[str], object] = str,
) -> None:
    """Raise UserError if the run cannot work; `say` gets a line about what is waited for."""
    check_descriptors(config)
    check_page(config.dashboard.bind)
    if not makes_model:
        check_model(config.model.path)
    if share:
        check_may_share(config)
        num_engines = len(config.engine.urls) or config.engine.num_embedded
        check_share(share, num_engines, config.launch.scheduler_wait_s, say)
    if config.engine.urls:
        async with ClientSession(timeout=ClientTimeout(total=ANSWER_S)) as session:
            for url in config.engine.urls:
                await check_engine(session, url)


def check_descriptors(config: Config) -> None:
    """ConfigError if our processes could not open all that they need."""
    num_rollouts = config.worker.max_rollouts
    allow_descriptors(PER_ROLLOUT * num_rollouts, f"worker.max_rollouts = {num_rollouts}")
    num_children = config.worker.num_workers + config.engine.num_embedded + NUM_OTHERS
    allow_descriptors(PER_CHILD * num_children, f"a run of {num_children} processes")


def check_page(bind: str) -> None:
    """AddressError if others could reach the page, which has no login."""
    host = bind.rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return
    raise AddressError(
        f"dashboard.bind = {bind}: the page has no login; bind 127.0.0.1:PORT and reach it "
        "through `ssh -L`"
    )


def check_model(path: str) -> None:
    """ModelError if `path` is no model folder."""
    if not path:
        raise ModelError(
            "model.path is not set; name a model folder in Hugging Face layout, or the id of a "
            f"downloaded model of the hub: --set model.path=DIR; {EXAMPLE}"
        )
    if why := why_no_model(path):
        raise ModelError(f"model.path = {path}: {why}")


async def check_engine(session: ClientSession, url: str) -> None:
    """AddressError if no engine answers at `url`."""
    try:
        async with session.get(f"{url.rstrip('/')}/model_info") as reply:
            status = reply.status
    except InvalidURL:
        raise AddressError(f"engine.urls: {url} is no address; write http://HOST:PORT") from None
    except (ClientError, TimeoutError) as error:
        why = str(error) or f"nothing within {ANSWER_S:g} s"
        raise AddressError(
            f"engine.urls: {url} does not answer ({why}); start SGLang there"
        ) from None
    if status != 200:
        raise AddressError(f"engine.urls: {url} is no SGLang: /model_info answers {status}")
