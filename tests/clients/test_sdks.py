"""The SDKs of this environment, openai and anthropic, through the gateway: every dialect."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.clients.drivers import anthropic_sdk, openai_sdk
from tests.clients.drivers.toolbox import ClientLog, Order
from tests.clients.gateway import Opened
from tests.clients.roster import IN_HOUSE, MESSAGES, STREAM, Row, rows
from tests.clients.script import task, write_files
from tests.clients.tasks import Deployment, Ended, open_deployment, perform_on

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """One gateway for all; each task has its own session."""
    async with open_deployment(tmp_path_factory.mktemp("stage"), task()) as deployment:
        yield deployment


async def play(row: Row, folder: Path, opened: Opened) -> Ended:
    """Run in a thread of this process, which has imported the SDK already."""
    write_files(folder / "work")
    log = ClientLog(folder / "work")
    ask = Order(opened.base_url, opened.api_key, row.dialect, row.mode == STREAM)
    driver = anthropic_sdk if row.dialect == MESSAGES else openai_sdk
    await asyncio.to_thread(driver.play, ask, log)
    return Ended(0, log.report())


@pytest.mark.parametrize("row", rows(IN_HOUSE), ids=lambda row: row.id)
async def test_an_sdk_does_the_task_and_its_samples_are_exact(
    deployment: Deployment, row: Row, tmp_path: Path
) -> None:
    ran = await perform_on(deployment, row, tmp_path, play)
    assert (ran.num_calls, ran.num_extending) == (3, 2)
