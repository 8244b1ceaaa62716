"""`rollmesh doctor` names a model, an engine or a router that does not suit, with a remedy."""

import asyncio
import email.utils
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.cli.doctor import check_tokenizer
from rollmesh.launch.doctor.findings import Level, Part
from rollmesh.launch.doctor.host import (
    check_gpus,
)
from rollmesh.launch.doctor.mesh import (
    TESTED_SGLANG,
    check_engines,
    check_model,
    check_router,
    check_sglang,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import KEYS_VARIABLE, Role, add_member, new_keys, remove_member
from rollmesh.wire.messages import AskMesh, MeshAnswered
from rollmesh.wire.sockets import Hub, WakeSignal, wait
from tests.flow.doctor import (
    UNSHARE,
    check_bad,
    doctor,
    needs_mounts,
    plan_of,
)
from tests.flow.doctor import home as home  # the fixture
from tests.flow.worker_mesh import Process, running


def rewrite(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


END, START, OTHER = "<|im_end|>", "<|endoftext|>", "<tool_call>"


@pytest.mark.parametrize(
    ("renderer", "eos_token", "eos", "level", "words"),
    [
        ("auto", END, (END, START), Level.OK, (f"stops at '{END}'",)),
        ("template", END, (START,), Level.OK, (f"stops at '{START}', '{END}'",)),
        ("template", "", (), Level.FAIL, ("has none",)),
        ("auto", END, (99_999,), Level.FAIL, ("eos_token_id is 99999", "tokenizer.json")),
        ("auto", END, (OTHER,), Level.WARN, (f"engines end them at '{OTHER}'",)),
        ("template", START, (START,), Level.WARN, (f"ends turns by '{END}'", f"only at '{START}'")),
    ],
)
def test_stop_tokens_of_which_the_files_disagree_are_named(
    home: Path,
    renderer: str,
    eos_token: str,
    eos: tuple[str | int, ...],
    level: Level,
    words: tuple[str, ...],
) -> None:
    model = home / "model"
    vocabulary = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [each if isinstance(each, int) else vocabulary.token_to_id(each) for each in eos]
    for name in ("config.json", "generation_config.json"):
        rewrite(model / name, eos_token_id=ids)
    rewrite(model / "tokenizer_config.json", eos_token=eos_token)
    [found] = check_tokenizer(plan_of(home, f"model.renderer={renderer}"))
    if level is Level.OK:
        assert found.level is level
    else:
        check_bad(found, level, "stop tokens")
    for word in words:
        assert word in found.line


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% if messages %}", "is not valid Jinja"),
        ("{{ raise_exception('no tools') }}", "refuses these messages: no tools"),
        ("{{ messages | length }}", "loses its text"),
        ("", "no chat template"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(home: Path, template: str, word: str) -> None:
    rewrite(home / "model/tokenizer_config.json", chat_template=template)
    [found] = check_tokenizer(plan_of(home, "model.renderer=template"))
    check_bad(found, Level.FAIL, "tokenizer", word)


def test_a_model_that_is_not_set_cut_off_or_of_a_shorter_context_is_named(home: Path) -> None:
    [found] = check_model(plan_of(home, "model.path="))
    check_bad(found, Level.FAIL, "model.path: is not set", "make-model")
    rewrite(home / "model/config.json", max_position_embeddings=32)
    _, found = check_model(plan_of(home))
    check_bad(found, Level.FAIL, "a context of 32 tokens, and model.max_context_tokens = 64")
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for key in ("rope_scaling", "rope_parameters"):
        config = {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}, key: yarn}
        rewrite(home / "model/config.json", **config)
        [found] = check_model(plan_of(home))
        assert found.level is Level.OK, "the engine's own length counts"
    (home / "model/config.json").write_text('{"model_type": ')
    _, found = check_model(plan_of(home))
    check_bad(found, Level.FAIL, "config.json")


def test_a_python_without_sglang_or_with_an_old_one_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mesh.toml").write_text(
        (home / "mesh.toml").read_text() + '[engine]\nlaunch="sglang"\n'
    )
    [found] = check_sglang(plan_of(home, "engine.python=/no/python"))
    check_bad(found, Level.FAIL, "engine.python = /no/python: no such file")
    [found] = check_gpus(plan_of(home, "engine.python=/no/python", parts=(Part.ENGINE,)))
    check_bad(found, Level.FAIL, "/no/python cannot import torch")
    bare = (sys.executable, "-S")
    (home / "python").write_text(f'#!/bin/sh\nexec {" ".join(bare)} "$@"\n')
    (home / "python").chmod(0o755)
    python = f"engine.python={home}/python"
    [found] = check_sglang(plan_of(home, python))
    check_bad(found, Level.FAIL, "it has no package sglang")
    (home / "site/sglang-0.4.9.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.9\n"
    (home / "site/sglang-0.4.9.dist-info/METADATA").write_text(metadata)
    (home / "site/sglang.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(home / "site"))
    [found] = check_sglang(plan_of(home, python))
    check_bad(found, Level.WARN, "SGLang 0.4.9", TESTED_SGLANG)


class OtherEngine(TestServer):
    """Answers like an SGLang server, with settings that may not suit."""

    def __init__(self) -> None:
        app = web.Application()
        for path in ("/model_info", "/server_info"):
            app.router.add_get(path, self._answer)
        super().__init__(app)
        self.info = {"version": TESTED_SGLANG, "context_length": 64, "model_path": "/m/model"}
        self.ahead_s = 0.0
        self.status = 200
        self.text = ""
        """Sent in place of the info."""
        self.date = ""
        self.pause_s: float | None = None
        """Pause between the parts of a body without an end."""
        self._ends = asyncio.Event()

    async def close(self) -> None:
        self._ends.set()
        await super().close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.pause_s is not None:
            response = web.StreamResponse()
            await response.prepare(request)
            part = b" " if self.pause_s else bytes(2**16)
            with suppress(ConnectionResetError):
                while not self._ends.is_set():
                    await response.write(part)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._ends.wait(), self.pause_s)
            return response
        if self.text or self.date:
            text = self.text or json.dumps(self.info)
            headers = {"Date": self.date} if self.date else {}
            return web.Response(text=text, headers=headers)
        date = email.utils.formatdate(time.time() + self.ahead_s, usegmt=True)
        return web.json_response(self.info, headers={"Date": date}, status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[OtherEngine]:
    engine = OtherEngine()
    await engine.start_server()
    yield engine
    await engine.close()


@pytest.mark.parametrize(
    ("info", "ahead_s", "status", "level", "part"),
    [
        ({"version": ""}, 0.0, 200, Level.WARN, "does not report its version"),
        ({}, 0.0, 200, Level.OK, f"{TESTED_SGLANG}, serves"),
        ({"context_length": 32}, 0.0, 200, Level.FAIL, "a context of 32 tokens"),
        ({"model_path": "/m/other"}, 0.0, 200, Level.WARN, "serves /m/other"),
        ({"version": "0.4.9"}, 0.0, 200, Level.WARN, "SGLang 0.4.9"),
        ({}, 20.0, 200, Level.WARN, "s ahead of ours"),
        ({}, -3600.0, 200, Level.FAIL, "s behind ours"),
        ({}, 0.0, 401, Level.FAIL, "needs a key"),
        ({}, 0.0, 500, Level.FAIL, "is not an SGLang server"),
    ],
)
async def test_an_engine_that_does_not_suit_is_named(
    home: Path,
    engine: OtherEngine,
    info: dict[str, Any],
    ahead_s: float,
    status: int,
    level: Level,
    part: str,
) -> None:
    engine.info |= info
    engine.ahead_s, engine.status = ahead_s, status
    plan, urls = plan_of(home), (str(engine.make_url("/")),)
    found = await asyncio.to_thread(lambda: list(check_engines(plan, urls)))
    bad = [each for each in found if each.level is not Level.OK]
    if level is not Level.OK:
        [each] = bad
        check_bad(each, level, part)
    assert any(part in each.line for each in found), found


async def test_engines_that_answer_garbage_or_never_are_one_line_each_in_bounded_time(
    home: Path,
) -> None:
    names = ("text", "list", "endless", "dated", "drips")
    engines = {name: OtherEngine() for name in names}
    engines["text"].text, engines["list"].text = "<html>", "[1]"
    engines["dated"].date = "yesterday"
    engines["endless"].pause_s, engines["drips"].pause_s = 0.0, 0.05
    async with AsyncExitStack() as stack:
        for each in engines.values():
            await each.start_server()
            stack.push_async_callback(each.close)
        noise = await asyncio.start_server(send_noise, "127.0.0.1", 0)
        silent = socket.create_server(("127.0.0.1", 0))
        ports = [each.port for each in engines.values()]
        ports += [noise.sockets[0].getsockname()[1], silent.getsockname()[1]]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        plan = plan_of(home, "launch.engine_check_timeout_s=1.0")
        begin_s = time.monotonic()
        many = urls + urls[-1:] * 30
        found = await asyncio.to_thread(lambda: list(check_engines(plan, many)))
        assert time.monotonic() - begin_s < 20.0, "engines are checked at once"
        noise.close()
        silent.close()
    failures = {each.check: each for each in found if each.level is Level.FAIL}
    no_server = "not an SGLang server"
    words = (no_server, no_server, no_server, "", "within 1 s", "does not answer (", "within 1 s")
    for url, word in zip(urls, words, strict=True):
        if word:
            check_bad(failures.pop(f"engine {url}"), Level.FAIL, word)
    assert failures == {}, "a date that cannot be read is ignored"


async def send_noise(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with bytes of no protocol."""
    writer.write(b"\x00\x1b[31m" * 100)
    writer.close()


def test_an_engine_that_does_not_answer_fails(home: Path) -> None:
    line = doctor(home, "--set", 'engine.urls=["http://127.0.0.1:9"]').of("FAIL", "engine")
    assert "does not answer (" in line


@contextmanager
def a_router(home: Path) -> Iterator[Process]:
    """A router with keys whose run folder is `home/runs/mesh`."""
    folder = home / "runs/mesh"
    folder.mkdir(parents=True)
    new_keys(folder / "keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS_VARIABLE, str(folder / "keys"))
        args = ("router", "--config", "mesh.toml", "--engine", "http://127.0.0.1:9")
        with running(home, *args) as router:
            patch.undo()
            yield router


def test_a_machine_that_can_join_a_mesh_is_told_which_engine_it_cannot_reach(home: Path) -> None:
    with a_router(home) as router:
        report = doctor(home, "--router", router.ready.address, "--run", "runs/mesh")
        assert "as worker, of role worker" in report.of("ok", "router")
        assert "is shared" in report.of("ok", "run folder")
        [failure] = report.failures
        assert failure.startswith("FAIL engine http://127.0.0.1:9: does not answer")


def test_a_key_that_was_removed_and_a_missing_router_fail(home: Path) -> None:
    with a_router(home) as router:
        add_member(home / "runs/mesh/keys", Role.WORKER, "gpu-2")
        own = home / "gpu-2.json"
        shutil.copy(home / "runs/mesh/keys/gpu-2.json", own)
        args = "--router", router.ready.address
        assert doctor(home, *args, ROLLMESH_KEYS=str(own)).of("ok", "router")
        plan = msgspec.structs.replace(plan_of(home), router=router.ready.address)
        [found], _ = check_router(plan, None)
        check_bad(
            found, Level.FAIL, "admits only holders of its keys", "we have no key", KEYS_VARIABLE
        )
        remove_member(home / "runs/mesh/keys", "gpu-2")
        assert "refuses our key" in doctor(home, *args, ROLLMESH_KEYS=str(own)).of("FAIL", "router")
    assert "cannot be reached" in doctor(home, *args, ROLLMESH_KEYS=str(own)).of("FAIL", "router")


@contextmanager
def scripted_router(ahead_s: float) -> Iterator[str]:
    """A router that answers AskMesh by a clock that is ahead of ours; its address."""
    hub, bell, ends = Hub("tcp://127.0.0.1:0"), WakeSignal(), threading.Event()

    def serve() -> None:
        while not ends.is_set():
            wait([hub], bell, 60.0)
            for route, packet in hub.receive():
                if isinstance(packet.message, AskMesh):
                    answer = MeshAnswered(1, (), "/runs/mesh", "", time.time() + ahead_s)
                    hub.send(route, Packet(answer))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield hub.address
    finally:
        ends.set()
        bell.ring()
        thread.join()
        hub.close()
        bell.close()


@pytest.mark.parametrize(
    ("ahead_s", "level", "word"),
    [
        (1.0, Level.OK, ""),
        (20.0, Level.WARN, "its clock is 20 s ahead of ours"),
        (-3600.0, Level.FAIL, "its clock is 3600 s behind ours"),
    ],
)
def test_a_router_whose_clock_differs_is_named(
    home: Path, ahead_s: float, level: Level, word: str
) -> None:
    with scripted_router(ahead_s) as address:
        plan = msgspec.structs.replace(plan_of(home, parts=(Part.WORKER,)), router=address)
        found, answer = check_router(plan, None)
    assert answer
    bad = [each for each in found if each.level is not Level.OK]
    assert bool(bad) == bool(word), found
    for each in bad:
        check_bad(each, level, f"router {address}", word, "synchronise both clocks")


async def test_an_address_where_another_program_answers_is_no_router(home: Path) -> None:
    noise = await asyncio.start_server(send_noise, "127.0.0.1", 0)
    router = f"tcp://127.0.0.1:{noise.sockets[0].getsockname()[1]}"
    plan = msgspec.structs.replace(plan_of(home), router=router)
    [found], answer = await asyncio.to_thread(check_router, plan, None)
    noise.close()
    assert answer is None
    check_bad(found, Level.FAIL, f"router {router}: ")


@pytest.mark.slow
def test_a_router_that_never_answers_is_one_line_in_bounded_time(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        router = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        report = doctor(home, "--router", router)
    [failure] = report.failures
    assert failure.startswith(f"FAIL router {router}: no answer within 3 s; check that a router")


@needs_mounts
def test_a_folder_that_is_not_shared_fails_where_engines_read_weights(home: Path) -> None:
    with a_router(home) as router:
        own = shutil.copytree(home / "runs/mesh/keys", home / "keys")
        (home / "other").mkdir()
        script = f'mount --bind {home}/other {home}/runs/mesh && exec "$0" "$@"'
        before = (UNSHARE, "--mount", "sh", "-c", script)
        args = ("--router", router.ready.address, "--parts", "engine,worker")
        line = doctor(home, *args, before=before, ROLLMESH_KEYS=str(own)).of("FAIL", "run folder")
        assert 'publish.mode = "distributed"' in line
