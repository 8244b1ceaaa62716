"""Logs: one shape for every source, bounded files, and never a secret."""

import asyncio
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rollmesh.core import logs
from rollmesh.core.ids import GroupId
from tests.disks import full_disk
from tests.log_setup import logs_as_before

SECRET = "qJ8s0yqH1cG0yF0xg0x2mZb3Y4kQ7nT5vW6uR1eS9dA"
log = logs.get_logger()


@pytest.fixture(autouse=True)
def _quiet_afterwards() -> Iterator[None]:
    with logs_as_before():
        yield


def lines(folder: Path, role: str) -> list[dict[str, Any]]:
    text = (folder / "logs" / f"{role}.log").read_bytes()
    return [msgspec.json.decode(line) for line in text.splitlines()]


def test_text_that_is_not_utf8_is_logged(tmp_path: Path) -> None:
    logs.setup("worker", tmp_path, on_console=False)
    log.warning("env.failed", why="no file \udcff", group=GroupId("r", 1))
    [line] = lines(tmp_path, "worker")
    assert (line["event"], line["why"]) == ("env.failed", "no file ?")


def test_an_event_is_a_json_line_with_role_level_time_and_its_keys(tmp_path: Path) -> None:
    logs.setup("router", tmp_path)
    log.info("group.assigned", group_id=GroupId("r1", 7), num_samples=4)
    [line] = lines(tmp_path, "router")
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "group.assigned",
        "role": "router",
        "level": "info",
        "group_id": ["r1", 7],
        "num_samples": 4,
    }


def test_events_of_a_library_have_the_same_shape(tmp_path: Path) -> None:
    logs.setup("worker-0", tmp_path)
    logging.getLogger("aiohttp.server").error("Error handling %s", "request")
    [line] = lines(tmp_path, "worker-0")
    assert line["event"] == "Error handling request"
    assert (line["role"], line["level"]) == ("worker-0", "error")


def test_requests_of_httpx_are_not_logged(tmp_path: Path) -> None:
    logs.setup("trainer", tmp_path)
    logging.getLogger("httpx").info("HTTP Request: GET http://router:8080/status")
    assert lines(tmp_path, "trainer") == []


def test_a_traceback_is_in_the_line_of_its_event(tmp_path: Path) -> None:
    logs.setup("router", tmp_path)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("loop.failed")
    [line] = lines(tmp_path, "router")
    assert "ValueError: broken" in line["exception"]


def test_a_warning_becomes_an_event(tmp_path: Path) -> None:
    logs.setup("router", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("be careful", stacklevel=1)
    assert any("be careful" in line["event"] for line in lines(tmp_path, "router"))


@pytest.mark.parametrize(
    ("event", "keys"),
    [
        ("session.opened", {"api_key": SECRET}),
        ("session.opened", {"Authorization": f"Basic {SECRET}"}),
        (f"GET /s/{SECRET}/v1/models", {}),
        ("call.failed", {"headers": f"Authorization: Bearer {SECRET}"}),
        ("call.failed", {"headers": {"x-api-key": SECRET}}),
        ("call.failed", {"base_url": f"http://127.0.0.1:1/s/{SECRET}/v1"}),
    ],
)
def test_no_secret_reaches_a_line(tmp_path: Path, event: str, keys: dict[str, Any]) -> None:
    logs.setup("worker-0", tmp_path)
    log.info(event, **keys)
    text = (tmp_path / "logs" / "worker-0.log").read_text()
    assert SECRET not in text
    assert "[hidden]" in text


def test_no_secret_reaches_a_traceback(tmp_path: Path) -> None:
    logs.setup("worker-0", tmp_path)
    try:
        raise ValueError(f"http://127.0.0.1:1/s/{SECRET}/v1 refused")
    except ValueError:
        logging.getLogger("asyncio").exception("Task failed")
    text = (tmp_path / "logs" / "worker-0.log").read_text()
    assert "refused" in text
    assert SECRET not in text


def test_without_a_folder_events_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", None)
    log.warning("worker.lost", worker_id="worker-1")
    printed = capsys.readouterr().err
    assert "worker.lost" in printed
    assert "worker_id=worker-1" in printed


def test_with_a_folder_and_no_terminal_stderr_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("router", tmp_path)
    log.warning("worker.lost")
    assert capsys.readouterr().err == ""


def test_a_second_setup_replaces_the_first(tmp_path: Path) -> None:
    logs.setup("router", tmp_path)
    logs.setup("router", tmp_path / "later")
    log.info("router.started")
    assert lines(tmp_path, "router") == []
    assert len(lines(tmp_path / "later", "router")) == 1


def test_a_log_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 2000)
    logs.setup("router", tmp_path)
    for _ in range(200):
        log.info("router.turned")
    sizes = [path.stat().st_size for path in (tmp_path / "logs").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 2000


def test_logging_never_loads_rich() -> None:
    code = "import rollmesh.core.logs, sys; assert 'rich' not in sys.modules; import rich"
    subprocess.run([sys.executable, "-c", code], check=True)


PROGRAM = """
import sys
from rollmesh.core.logs import get_logger
log = get_logger()
log.info("client.began")
log.error("journal.failed", error="no space left", api_key="sk-1234")
try:
    raise ValueError("x-api-key: 0123456789abcdefghij")
except ValueError:
    log.exception("intake.failed")
"""


def test_a_program_without_our_setup_gets_our_events_on_stderr() -> None:
    """Logging writes nothing to stdout, so a full stdout raises nothing."""
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, check=True)
    first, *traceback = done.stderr.decode().splitlines()
    assert first == "journal.failed error=no space left api_key=[hidden]"
    assert traceback[0] == "intake.failed"
    assert traceback[-1] == "ValueError: x-api-key: [hidden]"


def test_a_program_may_configure_structlog_itself() -> None:
    code = f"""
import structlog
structlog.configure(processors=[structlog.processors.JSONRenderer()])
{PROGRAM}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.startswith(b'{"event": "client.began"}')


def test_a_full_disk_costs_events_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("router", tmp_path, on_console=False)
    log.info("router.started")
    with full_disk(100):
        for _ in range(3):
            log.info("router.turned", why="x" * 200)
    log.info("router.stopped")
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"{tmp_path}/logs/router.log: File too large" in printed
    assert [each["event"] for each in lines(tmp_path, "router")][-1] == "router.stopped"


def test_a_log_that_cannot_be_opened_is_one_line_and_stderr_has_the_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("not a folder")
    logs.setup("router", tmp_path)
    log.info("router.started")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"rollmesh: {tmp_path}/logs/router.log: ")
    assert "router.started" in second


def test_equal_events_are_logged_in_powers_of_two() -> None:
    occasional = logs.Occasional()
    numbers = [occasional.number("refused") for _ in range(1000)]
    assert [each for each in numbers if each] == [2**n for n in range(10)]
    assert occasional.number("another") == 1


def test_keys_beyond_the_limit_are_counted_together() -> None:
    occasional = logs.Occasional()
    logged = [n for n in range(100_000) if occasional.number(n)]
    assert len(logged) < logs.MAX_KEYS + 20


async def test_bytes_that_are_not_http_log_nothing(tmp_path: Path) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response()

    logs.setup("server", tmp_path, on_console=False)
    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    [(host, port)] = runner.addresses
    for garbage in (b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100, b"POST / HTTP/1.1\r\nA b\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(garbage)
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
    await runner.cleanup()
    assert lines(tmp_path, "server") == []
