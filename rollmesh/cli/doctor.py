"""`rollmesh doctor`: check a machine before a run starts there; one line each, with the remedy.

    rollmesh doctor mesh.toml                                     before `rollmesh up`
    rollmesh doctor mesh.toml --router tcp://10.0.0.5:5555        on another machine

The exit code is 2 if a check failed, else 0.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.options import (
    add_model_dir,
    add_run,
    add_set,
    config_of,
    model_defaults,
    parser,
    set_model,
)
from rollmesh.core.addresses import split_address
from rollmesh.core.errors import AddressError, ModelError, SessionError, UserError
from rollmesh.core.process import OK, USAGE
from rollmesh.core.text import printable_json
from rollmesh.launch.doctor.findings import (
    Finding,
    Level,
    MachinePlan,
    Part,
    fail,
    failed,
    ok,
    warn,
)
from rollmesh.launch.doctor.host import (
    check_addresses,
    check_folder,
    check_gpus,
    check_keys,
    check_limits,
    check_packages,
    check_ports,
    check_space,
    size_of,
)
from rollmesh.launch.doctor.mesh import (
    check_engines,
    check_model,
    check_reach,
    check_router,
    check_sglang,
)
from rollmesh.runtime.chat import ChatMessage
from rollmesh.runtime.tokens.families import Family, TemplateRenderer, choose_family
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer

TEXT = "Guess 42: caf\u00e9, \u4f60\u597d,\n\tline two"
OF_THE_MODEL = "take the folder's files from the model's own repository"


def main(argv: list[str]) -> int:
    """Print the results of all checks; return 2 if one failed."""
    options = _arguments().parse_args(argv)
    findings: list[Finding] = []
    for each in _findings(options):
        findings.append(each)
        if not options.is_json:
            print(each.line, flush=True)
    if options.is_json:
        print(printable_json(msgspec.json.encode(findings).decode()))
    return USAGE if any(each.level is Level.FAIL for each in findings) else OK


def _arguments() -> argparse.ArgumentParser:
    arguments = parser(
        "doctor", "Check this machine before a run starts here: one line each, with the remedy."
    )
    arguments.add_argument("config", type=Path, metavar="mesh.toml", help="the settings")
    add_set(arguments)
    add_model_dir(arguments)
    arguments.add_argument(
        "--router",
        default="",
        metavar="ADDRESS",
        help="tcp:// address of a router that runs: check that this machine can join it",
    )
    arguments.add_argument(
        "--parts",
        default="",
        metavar="PART,...",
        help=f"what will run here, of {', '.join(Part)} (default: all, or worker with --router)",
    )
    add_run(arguments)
    arguments.add_argument(
        "--json", dest="is_json", action="store_true", help="print a JSON list of the results"
    )
    return arguments


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    plan = plan_of(options)
    yield from check_packages(plan)
    yield from check_ports(plan)
    yield from check_addresses(plan)
    findings, keys = check_keys(plan)
    yield from findings
    yield from check_limits(plan)
    if plan.has(Part.ROUTER, Part.TRAINER):
        yield from check_folder(plan)
    model = list(check_model(plan))
    yield from model
    if plan.has(Part.WORKER, Part.TRAINER) and all(each.level is Level.OK for each in model):
        yield from check_tokenizer(plan)
    yield from check_space(plan, size_of(Path(plan.config.model.path)))
    yield from check_gpus(plan)
    yield from check_sglang(plan)
    urls = plan.config.engine.urls
    unreached = check_reach(plan) if plan.router else []
    yield from unreached
    if plan.router and not unreached and all(each.level is Level.OK for each in findings):
        seen, answer = check_router(plan, keys)
        yield from seen
        urls = tuple(dict.fromkeys((*urls, *(answer.engines if answer else ()))))
    if urls:
        yield from check_engines(plan, urls)
    elif plan.starts_engines:
        yield ok("engines", f"the run starts {plan.config.engine.num_launched}")


def plan_of(options: argparse.Namespace) -> MachinePlan:
    """Return what the options name; UserError for wrong settings or parts."""
    set_model(options)
    config = config_of(options, model_defaults(options))
    host, port = split_address(options.router)
    if options.router and not (options.router.startswith("tcp://") and host and port.isdecimal()):
        raise AddressError(f"--router {options.router}: write it as tcp://HOST:PORT")
    named = options.parts or ("worker" if options.router else ",".join(Part))
    try:
        parts = frozenset(Part(each.strip()) for each in named.split(","))
    except ValueError:
        raise UserError(f"--parts {named}: choose of {', '.join(Part)}") from None
    return MachinePlan(config=config, parts=parts, router=options.router, run=options.run)


def check_tokenizer(plan: MachinePlan) -> Iterator[Finding]:
    """Check that a chat becomes tokens, and these the same text again."""
    path, renderer = plan.config.model.path, plan.config.model.renderer
    check = "tokenizer"
    try:
        tokenizer = load_tokenizer(Path(path))
        if (read := tokenizer.decode(tokenizer.encode(TEXT))) != TEXT:
            why = f"{TEXT!r} becomes {read!r} when it is encoded and decoded"
            yield fail(check, why, "take tokenizer.json from the model's own repository")
            return
        family = choose_family(Path(path), renderer, tokenizer)
        messages = [ChatMessage("user", TEXT).for_template()]
        prompt = family.renderer.render_ids(messages, tools=None, add_generation_prompt=True)
        stops = family.renderer.get_stop_token_ids()
        ends = _ends_of_engines(Path(path))
    except (UserError, SessionError, ValueError, KeyError, TypeError) as error:
        yield failed(check, error, OF_THE_MODEL)
        return
    if TEXT not in tokenizer.decode(prompt):
        why = f"a chat in the format of model.renderer = {renderer} loses its text"
        yield fail(check, why, 'set model.renderer = "template"')
        return
    if fault := _fault_of_stops(family, tokenizer, stops, ends):
        yield fault
        return
    shown = _shown(tokenizer, stops)
    yield ok(check, f"a chat of {len(prompt)} tokens reads the same; stops at {shown}")


def _ends_of_engines(folder: Path) -> list[int]:
    """Return the tokens at which engines end a turn by the model's own files."""
    ends: list[int] = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        if not path.is_file():
            continue
        try:
            eos = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("eos_token_id")
        except msgspec.MsgspecError as error:
            raise ModelError(f"{path}: not a JSON object: {error}") from None
        found = eos if isinstance(eos, list) else [eos]
        ends += [each for each in found if isinstance(each, int)]
    return list(dict.fromkeys(ends))


def _fault_of_stops(
    family: Family, tokenizer: Tokenizer, stops: list[int], ends: list[int]
) -> Finding | None:
    """Compare the stop tokens of the chat format with the vocabulary, the engines' and the
    template's.
    """
    check = "stop tokens"
    if not stops:
        why = "the chat format has none"
        return fail(check, why, "name eos_token in tokenizer_config.json")
    if unknown := [each for each in (*stops, *ends) if not tokenizer.decode([each])]:
        why = f"eos_token_id is {unknown[0]}, which tokenizer.json does not have"
        return fail(check, why, OF_THE_MODEL)
    if ends and not set(ends) & set(stops):
        why = f"the chat format ends turns at {_shown(tokenizer, stops)}, and engines end them at "
        remedy = "correct eos_token_id in generation_config.json and config.json"
        return warn(check, f"{why}{_shown(tokenizer, ends)}", remedy)
    if closing := _closing(family, tokenizer, stops):
        why = f"the chat template ends turns by {closing!r}, and sampling stops only at "
        remedy = "add its token to eos_token_id in generation_config.json"
        return warn(check, f"{why}{_shown(tokenizer, stops)}", remedy)
    return None


def _closing(family: Family, tokenizer: Tokenizer, stops: list[int]) -> str:
    """Return the text by which the model's own template ends a turn, if no stop token is in it."""
    if not isinstance(family.renderer, TemplateRenderer):
        return ""
    chat = [ChatMessage("user", "x").for_template(), ChatMessage("assistant", TEXT).for_template()]
    try:
        ids = family.renderer.render_ids(chat)
    except SessionError:
        return ""
    _, is_found, closing = tokenizer.decode(ids).rpartition(TEXT)
    is_closed = not is_found or set(tokenizer.encode(closing)) & set(stops)
    return "" if is_closed else closing.strip()


def _shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return ", ".join(repr(tokenizer.decode([each])) for each in ids)
