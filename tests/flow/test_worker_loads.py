"""Workers whose environment does not load: waiting clients get the reason at once."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.client.client import Dropped, Finished
from rollmesh.serve.router.process import CAUSE
from tests.flow.worker_mesh import PATIENCE_S, Mesh, ask, ended, open_mesh, take


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


FAILS_TO_LOAD = {
    "raises": "raise OSError('no such data set')",
    "exits": "sys.exit(7)",
    "hangs": "def wait_for_nothing():\n    threading.Event().wait()\nwait_for_nothing()",
    "constructor": "class TheEnv(Plain):\n    def __init__(self):\n        raise OSError('no GPU')",
    "constructor_hangs": (
        "class TheEnv(Plain):\n    def __init__(self):\n        while True:\n            pass"
    ),
}


LIMIT_S = 4
CAUSES = {
    "raises": "OSError: no such data set",
    "exits": "SystemExit: 7",
    "hangs": f"worker.load_timeout_s = {LIMIT_S}; it is in ",
    "constructor": "could not be built: OSError: no GPU",
    "constructor_hangs": f"worker.load_timeout_s = {LIMIT_S}; it is in ",
}


@pytest.mark.slow
async def test_environment_that_fails_to_load_is_reported_to_its_clients_at_once(
    mesh: Mesh,
) -> None:
    client = mesh.client()

    async def fail(how: str) -> str:
        env = mesh.write_env(how, FAILS_TO_LOAD[how])
        early[ask(client, env=env)] = how
        limit_s = LIMIT_S if "hangs" in how else PATIENCE_S
        code, err = await ended(mesh.worker_args(how, env, load_timeout_s=limit_s), mesh.folder)
        assert code == 2
        [line] = err.splitlines()
        assert line.startswith(f'rollmesh: env = "{env}"')
        late[ask(client, env=env)] = how
        return line.removeprefix("rollmesh: ")

    early, late = dict[GroupId, str](), dict[GroupId, str]()
    lines = dict(zip(FAILS_TO_LOAD, await asyncio.gather(*map(fail, FAILS_TO_LOAD)), strict=True))
    reasons = {}
    for dropped in await take(client, 2 * len(lines)):
        assert isinstance(dropped, Dropped)
        reasons[dropped.group_id] = dropped.reason
    for group_id, how in (early | late).items():
        assert reasons[group_id] == f"env_failed: {lines[how]}"
    for how, cause in CAUSES.items():
        assert cause in lines[how]
    for how in ("hangs", "constructor_hangs"):
        assert f"({how}.py:" in lines[how].partition("it is in ")[2]


async def test_failed_environment_is_reported_to_a_router_that_was_away(mesh: Mesh) -> None:
    env = mesh.write_env("raises", FAILS_TO_LOAD["raises"])
    address = mesh.router.ready.address
    args = mesh.worker_args("worker-0", env)
    await asyncio.to_thread(mesh.router.kill)
    failing = asyncio.ensure_future(ended(args, mesh.folder))
    mesh.router = await asyncio.to_thread(mesh.start_router, address)
    assert (await failing)[0] == 2
    client = mesh.client()
    ask(client, env=env)
    [dropped] = await take(client)
    assert isinstance(dropped, Dropped)
    assert "no such data set" in dropped.reason


CRASHES = {
    "segfaults": ("import ctypes\nctypes.string_at(0)", -signal.SIGSEGV),
    "aborts": ("os.abort()", -signal.SIGABRT),
    "exits_hard": ("os._exit(3)", 3),
}
NO_CORE = "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"


@pytest.mark.parametrize("how", CRASHES)
async def test_crash_in_a_load_is_reported_to_clients_at_once(mesh: Mesh, how: str) -> None:
    source, code = CRASHES[how]
    env = mesh.write_env(how, NO_CORE + source)
    client = mesh.client()
    ask(client, env=env)
    assert (await ended(mesh.worker_args("worker-0", env), mesh.folder))[0] == code
    early = await take(client)
    ask(client, env=env)
    for dropped in [*early, *await take(client)]:
        assert isinstance(dropped, Dropped)
        assert dropped.reason == f"env_failed: worker-0 ended before it served {env}: {CAUSE}"


LOADS_WHERE_IT_CAN = """
if "crasher" in sys.argv:
    os._exit(3)
while not Path("go").exists():
    time.sleep(0.01)

class TheEnv(Plain):
    pass
"""


async def test_groups_wait_for_an_environment_that_another_worker_still_loads(mesh: Mesh) -> None:
    env = mesh.write_env("some_hosts", LOADS_WHERE_IT_CAN)
    client = mesh.client()
    ask(client, env=env)
    loading = asyncio.ensure_future(asyncio.to_thread(mesh.worker, "worker-0", env))
    await mesh.until(lambda: mesh.worker_status("worker-0").get("state") == "loading")
    assert (await ended(mesh.worker_args("crasher", env), mesh.folder))[0] == 3
    await mesh.until(lambda: not mesh.worker_status("crasher"))
    (mesh.folder / "go").touch()
    await loading
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    await mesh.until(lambda: mesh.worker_status("worker-0")["state"] == "live")
