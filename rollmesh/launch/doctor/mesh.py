"""Checks of what this machine connects to: the model's files, the engines and the router."""

import email.utils
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollmesh.core.addresses import split_address
from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.core.model_folders import why_no_folder, why_no_model
from rollmesh.core.run_state import folder_mark
from rollmesh.core.secret_files import process_engine_key
from rollmesh.launch.doctor.findings import Finding, MachinePlan, Part, fail, failed, ok, warn
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import AskMesh, MeshAnswered
from rollmesh.wire.sockets import Dialer, check_admitted, wait

TESTED_SGLANG = "0.5.21"
"""The version of the contract tests."""
ANSWER_S, REPEAT_S = 3.0, 0.5
CONNECT_S = 3.0
SKEW_WARN_S, SKEW_FAIL_S = 3.0, 60.0
"""The Date of HTTP has whole seconds."""
SYNCHRONISE = "synchronise both clocks (chronyd, ntpd)"


def check_model(plan: MachinePlan) -> Iterator[Finding]:
    """Check the files of the model folder."""
    path = plan.config.model.path
    needs_weights = plan.has(Part.TRAINER) or plan.starts_engines
    name = f"model.path = {path}"
    if why := (why_no_model if needs_weights else why_no_folder)(path):
        found, _, remedy = why.partition("; ")
        yield fail(name, found, remedy or "copy the files of the engines' model there")
        return
    yield ok(name, "has its files" if needs_weights else "is a folder")


def check_engines(plan: MachinePlan, urls: tuple[str, ...]) -> Iterator[Finding]:
    """Check that each engine answers, and its version, model, context length and clock."""
    key = process_engine_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout_s = plan.config.launch.engine_check_timeout_s
    with httpx.Client(headers=headers, timeout=timeout_s, trust_env=False) as http:
        for url in urls:
            yield from _check_engine(plan, http, url.rstrip("/"))


def _check_engine(plan: MachinePlan, http: httpx.Client, url: str) -> Iterator[Finding]:
    check = f"engine {url}"
    try:
        answer, before_s = http.get(f"{url}/model_info"), time.time()
        details = http.get(f"{url}/server_info")
        if details.status_code == httpx.codes.NOT_FOUND:
            details = http.get(f"{url}/get_server_info")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = f"does not answer: {str(error) or type(error).__name__}"
        yield fail(check, why, "start it, or open its port to this machine")
        return
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        yield fail(
            check, "needs a key", "set ROLLMESH_ENGINE_KEY_FILE to the file of its --api-key"
        )
        return
    model, server = _fields(answer), _fields(details)
    if "model_path" not in model:
        why = f"is not an SGLang server: /model_info returned status {answer.status_code}"
        yield fail(check, why, "correct engine.urls")
        return
    if date := answer.headers.get("date"):
        seen_s = email.utils.parsedate_to_datetime(date).timestamp()
        yield from _skew(check, seen_s + 0.5 - before_s)
    yield _context(plan, check, server)
    served, named = Path(str(model["model_path"])), Path(plan.config.model.path)
    release = str(server.get("version", "of unknown version"))
    if served.name != named.name and not _is_published(plan, served):
        why = f"serves {served}, and model.path = {named}"
        yield warn(check, why, "check that both are the same model, or prompts and weights differ")
    elif release[:1].isdecimal() and _numbers(release) < _numbers(TESTED_SGLANG):
        yield warn(check, f"SGLang {release}", f"tests run with {TESTED_SGLANG}: install it")
    else:
        yield ok(check, f"{release}, serves {served}")


def _is_published(plan: MachinePlan, served: Path) -> bool:
    return served.parent.name == "weights" and served.parent.parent.name == plan.config.run.name


def _context(plan: MachinePlan, check: str, server: dict[str, Any]) -> Finding:
    wanted = plan.config.model.max_context_tokens
    found = server.get("context_length") or server.get("max_req_input_len")
    if not isinstance(found, int):
        return ok(check, "does not report its context length")
    if found < wanted:
        why = f"has a context of {found} tokens, and model.max_context_tokens = {wanted}"
        return fail(check, why, f"start it with --context-length {wanted}, or lower the setting")
    return ok(check, f"context of {found} tokens, {wanted} needed")


def _fields(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(answer.content)
    except msgspec.MsgspecError:
        return {}
    return found if isinstance(found, dict) and answer.is_success else {}


def _numbers(release: str) -> list[int]:
    return [int(each) for each in release.split(".")[:3] if each.isdecimal()]


def _skew(check: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) < SKEW_WARN_S:
        return
    how = fail if abs(skew_s) > SKEW_FAIL_S else warn
    direction = "ahead of" if skew_s > 0 else "behind"
    yield how(check, f"its clock is {abs(skew_s):.0f} s {direction} ours", SYNCHRONISE)


def check_router(plan: MachinePlan, keys: Keys | None) -> tuple[list[Finding], MeshAnswered | None]:
    """Check that the router at `plan.router` can be reached and admits `keys`; return its answer
    too.
    """
    check, router = f"router {plan.router}", plan.router
    host, port = split_address(router)
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        why = f"cannot be reached: {getattr(error, 'strerror', None) or error}".lower()
        remedy = "check that it runs, router.bind, and the firewall between the machines"
        return [fail(check, why, remedy)], None
    try:
        check_admitted(router, keys)
        answer = ask_router(router, keys)
    except AddressError as error:
        return [failed(check, error)], None
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
