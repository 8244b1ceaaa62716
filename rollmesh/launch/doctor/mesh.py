"""Checks of what this machine connects to: the model's files, the engines and the router."""

import asyncio
import email.utils
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollmesh.core.addresses import split_address
from rollmesh.core.errors import AddressError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.model_folders import why_no_folder
from rollmesh.core.run_state import folder_mark
from rollmesh.core.secret_files import process_engine_key
from rollmesh.launch.checks import check_model as check_folder_of_model
from rollmesh.launch.checks import check_python
from rollmesh.launch.doctor.findings import Finding, MachinePlan, Part, fail, failed, ok, warn
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import AskMesh, MeshAnswered
from rollmesh.wire.sockets import Dialer, check_admitted, wait

TESTED_SGLANG = "0.5.21"
"""The version of the contract tests."""
ANSWER_S, REPEAT_S = 3.0, 0.5
CONNECT_S = 3.0
PROBE_S = 60.0
"""Time in which a Python of SGLang reports its version."""
MAX_ANSWER_BYTES = 4 * 2**20
"""More of an engine's answer is not read."""
SKEW_WARN_S, SKEW_FAIL_S = 3.0, 60.0
"""The Date of HTTP has whole seconds."""
SYNCHRONISE = "synchronise both clocks (chronyd, ntpd)"
START_ROUTER = "check that it runs, router.bind, and the firewall between the machines"
VERSION_OF_SGLANG = "from importlib.metadata import version; print(version('sglang'))"


def check_model(plan: MachinePlan) -> Iterator[Finding]:
    """Check the files of the model folder, and the context length that its config names."""
    path = plan.config.model.path
    needs_weights = plan.has(Part.TRAINER) or plan.starts_engines
    name = f"model.path = {path}" if path else "model.path"
    if needs_weights or not path:
        try:
            check_folder_of_model(path)
        except UserError as error:
            text = str(error).removeprefix(f"{name}: ").removeprefix("model.path ")
            yield failed(name, UserError(text), "copy the model's files there")
            return
    elif why := why_no_folder(path):
        yield failed(name, UserError(why), "copy the model's tokenizer and config.json there")
        return
    yield ok(name, "has its files" if needs_weights else "is a folder")
    if plan.starts_engines and not _names_context(plan):
        yield from _context_of_folder(plan, name, Path(path))


def _names_context(plan: MachinePlan) -> bool:
    """Return whether the options of the SGLang servers choose a context length."""
    return any(word.startswith("--context-length") for word in plan.config.engine.args)


def _context_of_folder(plan: MachinePlan, name: str, folder: Path) -> Iterator[Finding]:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        yield fail(name, f"config.json: {error}", "copy the model's config.json there")
        return
    text = nested if isinstance(nested := config.get("text_config"), dict) else config
    found = text.get("max_position_embeddings")
    wanted = plan.config.model.max_context_tokens
    if isinstance(found, int) and found < wanted and not _is_scaled(text):
        why = f"the model has a context of {found} tokens, and model.max_context_tokens = {wanted}"
        yield fail(name, why, f"lower the setting to {found}, or choose another model")


def _is_scaled(config: dict[str, Any]) -> bool:
    """Return whether engines may serve more than max_position_embeddings (YaRN and others)."""
    kinds = ("rope_scaling", "rope_parameters")  # transformers 4 and 5
    found = [each for kind in kinds if isinstance(each := config.get(kind), dict)]
    return any(each.get("rope_type", each.get("type", "default")) != "default" for each in found)


def check_sglang(plan: MachinePlan) -> Iterator[Finding]:
    """Check that the Python of launched servers has SGLang, and its version."""
    engine = plan.config.engine
    if not plan.starts_engines or engine.launch != "sglang":
        return
    check = "sglang"
    try:
        asyncio.run(check_python(plan.config))
        argv = [engine.server_python, "-c", VERSION_OF_SGLANG]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PROBE_S)
    except UserError as error:
        yield failed(check, error, "install sglang there")
        return
    except subprocess.TimeoutExpired:
        why = f"engine.python = {engine.server_python}: no answer within {PROBE_S:g} s"
        yield fail(check, why, "name another Python")
        return
    yield _release(check, done.stdout.strip(), "")


def _release(check: str, release: str, serves: str) -> Finding:
    """Compare a version of SGLang, or of another engine, with the tested one."""
    if not release:
        return warn(
            check, "does not report its version", f"tests run with SGLang {TESTED_SGLANG}: use it"
        )
    if release[:1].isdecimal() and _numbers(release) < _numbers(TESTED_SGLANG):
        return warn(check, f"SGLang {release}", f"tests run with {TESTED_SGLANG}: install it")
    return ok(check, f"{release}{serves}")


class EngineAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one engine, or why there are none."""

    why_none: str = ""
    status: int = 0
    date: str = ""
    read_s: float = 0.0
    """Time of our clock when `date` was read."""
    model: dict[str, Any] = {}
    server: dict[str, Any] = {}


def check_engines(plan: MachinePlan, urls: tuple[str, ...]) -> Iterator[Finding]:
    """Check that each engine answers, and its version, model, context length and clock."""
    key = process_engine_key()
    timeout_s = plan.config.launch.engine_check_timeout_s
    for url, answers in zip(urls, asyncio.run(_read_all(urls, key, timeout_s)), strict=True):
        yield from _check_engine(plan, f"engine {url.rstrip('/')}", answers, has_key=bool(key))


async def _read_all(urls: Sequence[str], key: str, timeout_s: float) -> list[EngineAnswers]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=timeout_s, trust_env=False) as http:
        return await asyncio.gather(*[_read(http, url.rstrip("/"), timeout_s) for url in urls])


async def _read(http: httpx.AsyncClient, url: str, timeout_s: float) -> EngineAnswers:
    """Return the engine's answers, all within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            model, fields = await _get(http, f"{url}/model_info")
            read_s = time.time()
            details, server = await _get(http, f"{url}/server_info")
            if details.status_code == httpx.codes.NOT_FOUND:
                _, server = await _get(http, f"{url}/get_server_info")
    except TimeoutError:
        return EngineAnswers(why_none=f"within {timeout_s:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return EngineAnswers(why_none=f"({str(error) or type(error).__name__})")
    return EngineAnswers(
        status=model.status_code,
        date=model.headers.get("date", ""),
        read_s=read_s,
        model=fields,
        server=server,
    )


async def _get(http: httpx.AsyncClient, url: str) -> tuple[httpx.Response, dict[str, Any]]:
    """Return the answer and the JSON object in its body; {} if there is none."""
    body = b""
    async with http.stream("GET", url) as answer:
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                break
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        found = None
    return answer, found if isinstance(found, dict) and answer.is_success else {}


def _check_engine(
    plan: MachinePlan, check: str, answers: EngineAnswers, *, has_key: bool
) -> Iterator[Finding]:
    if answers.why_none:
        why = f"does not answer {answers.why_none}"
        yield fail(check, why, "start it, or open its port to this machine")
        return
    if answers.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        why = "refuses our key" if has_key else "needs a key"
        yield fail(check, why, "set ROLLMESH_ENGINE_KEY_FILE to the file of its --api-key")
        return
    if "model_path" not in answers.model:
        why = f"is not an SGLang server: /model_info returned status {answers.status}, no model"
        yield fail(check, why, "correct engine.urls")
        return
    if (unix_s := _unix_s(answers.date)) is not None:
        yield from _skew(check, unix_s + 0.5 - answers.read_s)
    yield _context(plan, check, answers.server)
    served, named = Path(str(answers.model["model_path"])), Path(plan.config.model.path)
    if served.name != named.name and not _is_published(plan, served):
        why = f"serves {served}, and model.path = {named}"
        yield warn(check, why, "check that both are the same model, or prompts and weights differ")
    yield _release(check, str(answers.server.get("version", "")), f", serves {served}")


def _unix_s(date: str) -> float | None:
    """Return the time of a Date header; None if there is none."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _is_published(plan: MachinePlan, served: Path) -> bool:
    return served.parent.name == "weights" and served.parent.parent.name == plan.config.run.name


def _context(plan: MachinePlan, check: str, server: dict[str, Any]) -> Finding:
    wanted = plan.config.model.max_context_tokens
    found = server.get("context_length") or server.get("max_req_input_len")
    if not isinstance(found, int):
        return ok(check, "does not report its context length")
    if found < wanted:
        why = f"has a context of {found} tokens, and model.max_context_tokens = {wanted}"
        remedy = f"start it with --context-length {wanted}, or lower the setting"
        is_ours = str(server.get("version", "")).startswith("rollmesh")
        return fail(check, why, "lower the setting" if is_ours else remedy)
    return ok(check, f"context of {found} tokens, {wanted} needed")


def _numbers(release: str) -> list[int]:
    return [int(each) for each in release.split(".")[:3] if each.isdecimal()]


def _skew(check: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) < SKEW_WARN_S:
        return
    how = fail if abs(skew_s) > SKEW_FAIL_S else warn
    direction = "ahead of" if skew_s > 0 else "behind"
    yield how(check, f"its clock is {abs(skew_s):.0f} s {direction} ours", SYNCHRONISE)


def check_reach(plan: MachinePlan) -> list[Finding]:
    """Return a failure if nothing accepts connections at `plan.router`."""
    host, port = split_address(plan.router)
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            return []
    except (OSError, ValueError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).lower()
        return [fail(f"router {plan.router}", f"cannot be reached: {why}", START_ROUTER)]


def check_router(plan: MachinePlan, keys: Keys | None) -> tuple[list[Finding], MeshAnswered | None]:
    """Check that the router at `plan.router` answers and admits `keys`; return its answer too."""
    check, router = f"router {plan.router}", plan.router
    try:
        check_admitted(router, keys)
        answer = ask_router(router, keys)
    except AddressError as error:
        text = str(error).removeprefix(f"{router}: ")
        return [failed(check, AddressError(text), START_ROUTER)], None
    if answer is None:
        why = f"no answer within {ANSWER_S:g} s"
        return [fail(check, why, "check that a router of this release is there, and its log")], None
    named = f" as {keys.name}, of role {keys.role}" if keys else ""
    findings = [ok(check, f"answers, and admits this machine{named}")]
    findings += _skew(check, answer.unix_s - time.time())
    findings.append(_shared(plan, answer))
    return findings, answer


def ask_router(router: str, keys: Keys | None) -> MeshAnswered | None:
    """Return the router's answer; None if there is none in time."""
    dialer = Dialer(router, new_id("doctor"), keys)
    try:
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            dialer.send(Packet(AskMesh(1)))
            wait([dialer], None, REPEAT_S)
            for packet in dialer.receive():
                if isinstance(packet.message, MeshAnswered):
                    return packet.message
    finally:
        dialer.close()
    return None


def _shared(plan: MachinePlan, answer: MeshAnswered) -> Finding:
    """Check whether the run's folder of the router is visible here, where that matters."""
    folder = Path(answer.run_folder)
    check = f"run folder {folder}"
    if not answer.folder_mark:
        return ok(check, "the router has none")
    if folder_mark(folder) == answer.folder_mark:
        return ok(check, "is shared with the router's machine")
    if plan.has(Part.ENGINE, Part.TRAINER) and plan.config.publish.mode == "disk":
        why = "is not that of the router here, and publish.mode = disk needs it"
        remedy = 'mount it at the same path, or set publish.mode = "distributed"'
        return fail(check, why, remedy)
    return ok(check, "is not shared; workers need only the model folder")
