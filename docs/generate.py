"""MkDocs hook: reference pages from the code, and checks of the pages that are written by hand.

- `on_files` adds reference/config, fleet-file, cli, http-api, metrics, run-folder and python.
- `on_page_markdown` turns links to files outside docs/ into plain text. It warns if such a file, or
  a test that a page names as proof, does not exist. Warnings fail the build (`strict: true`).
"""

import ast
import functools
import importlib
import inspect
import itertools
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
PROOF = re.compile(r"`((?:tests/[a-z_/]+/)?test_[a-z_]+)(?:::(test_[a-z_]+?)(\.\.\.)?)?`")
SUB_VERB = re.compile(r"^  ([a-z][a-z-]+) {2,}\S", re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.generate")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links to files outside docs/; warn about files and tests that do not exist."""
    folder = Path(page.file.src_uri).parent

    def outside(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(Path("docs") / folder / target)
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            log.warning("%s: %s does not exist", page.file.src_uri, path)
        return text if "`" in text else f"{text} (`{path}`)"

    for file, test, is_cut in PROOF.findall(markdown):
        if why := why_no_proof(file, test, bool(is_cut)):
            log.warning("%s: %s", page.file.src_uri, why)
    return LINK.sub(outside, markdown)


def why_no_proof(file: str, test: str, is_cut: bool) -> str:
    """Reason why a test that a page names does not exist; '' if it exists."""
    path = ROOT / (f"{file}.py" if "/" in file else f"tests/flow/{file}.py")
    if not path.is_file():
        return f"no test file {path.relative_to(ROOT)}"
    name = (test or "test_") + (r"\w*" if is_cut or not test else "")
    if not re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE):
        return f"no test {test} in {path.relative_to(ROOT)}"
    return ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""

    def line(cells: tuple[str, ...]) -> str:
        return (
            "| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in cells) + " |"
        )

    return "\n".join([line(head), line(("---",) * len(head)), *map(line, rows)]) + "\n"


# Settings


def config_page() -> str:
    """Page of the keys of mesh.toml."""
    from rollmesh.core.config import Config

    parts = [
        "# Settings\n",
        "Keys of `mesh.toml`. `rollmesh init` writes the basic ones and `rollmesh init --all` "
        "every one; `--set section.key=value` of any verb overrides one. Unknown keys are refused. "
        "Sizes are in bytes and times in seconds where a name ends in `_bytes` or `_s`.\n",
        *sections(Config, "", "Top level"),
    ]
    return "\n".join(parts)


def fleet_page() -> str:
    """Page of the keys of scheduler.toml."""
    parts = [
        "# The fleet file\n",
        "Keys of `scheduler.toml`, which describes a GPU fleet that several runs share "
        "([how to](../howto/share-a-fleet.md)). `rollmesh scheduler init` writes an example. "
        "Unknown keys are refused with their path.\n",
    ]
    kinds = {
        "": defined("FleetTables"),
        "[nodes]": defined("NodeTable"),
        "pipelines.NAME": defined("PipelineTable"),
    }
    settings_of = defined("policy_settings_type")
    kinds |= {name: settings_of(name) for name in defined("policy_names")() if settings_of(name)}
    for name, kind in (*kinds.items(), ("service", defined("SchedulerSettings"))):
        title = f"`[{name}]`" if name else "Top level"
        parts += [f"## {title}\n", about(kind) + "\n", settings_table(kind, "")]
    return "\n".join(parts)


def sections(kind: type[msgspec.Struct], prefix: str, title: str) -> Iterator[str]:
    """Heading and table of a struct, then those of each struct among its fields."""
    yield f"## {title}\n"
    yield about(kind) + "\n"
    yield settings_table(kind, prefix)
    for field in msgspec.structs.fields(kind):
        if isinstance(field.default, msgspec.Struct):
            yield from sections(type(field.default), f"{prefix}{field.name}.", f"`[{field.name}]`")


def settings_table(kind: type[msgspec.Struct], prefix: str) -> str:
    """Table of key, type, default and meaning of each field that is not itself a section."""
    docs = field_docs(kind)
    rows = []
    for field in msgspec.structs.fields(kind):
        if isinstance(field.default, msgspec.Struct):
            continue
        key = f"{prefix}{field.encode_name}"
        if field.name not in docs:
            log.warning("%s: no docstring says what the setting is", key)
        meaning = docs.get(field.name, "")
        rows.append((f"`{key}`", type_text(field.type), default_text(field), meaning))
    return table(("key", "type", "default", "meaning"), rows)


def about(kind: type) -> str:
    """The docstring of a struct as one paragraph."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


def field_docs(kind: type) -> dict[str, str]:
    """Strings below the fields in the source of a class and of its base classes, by field name."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        if each.__module__.startswith("rollmesh"):
            [owner] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(owner, ast.ClassDef)
            docs |= dict(strings_below(owner.body))
    return docs


def strings_below(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Name and text of each assignment that a string literal follows."""
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield name, " ".join(str(below.value.value).split())


def type_text(kind: Any) -> str:
    """Readable name of a type, with its bounds."""
    return info_text(msgspec.inspect.type_info(kind))


def info_text(info: Any) -> str:
    """Readable name of a type that msgspec has inspected."""
    name = type(info).__name__
    match name:
        case "IntType" | "FloatType":
            return {"IntType": "integer", "FloatType": "number"}[name] + bounds(info)
        case "LiteralType":
            return ", ".join(f"`{value}`" for value in info.values)
        case "EnumType":
            return ", ".join(f"`{each.value}`" for each in info.cls)
        case "VarTupleType" | "ListType":
            return f"list of {info_text(info.item_type)}"
        case "DictType":
            return "table" if type(info.value_type).__name__ == "AnyType" else "table by name"
        case "UnionType":
            return " or ".join(info_text(each) for each in info.types if not is_none(each))
        case "Metadata":
            return info_text(info.type)
        case "StructType":
            return "table"
    return {"StrType": "text", "BoolType": "true, false"}.get(
        name, name.removesuffix("Type").lower()
    )


def is_none(info: Any) -> bool:
    """Whether the type is that of None."""
    return type(info).__name__ == "NoneType"


def bounds(info: Any) -> str:
    """Bounds of a number, such as ', at least 1'."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = ((word, getattr(info, name)) for name, word in words.items())
    return "".join(f", {word} {value:g}" for word, value in found if value is not None)


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """Default of a field in TOML's notation."""
    value = field.default
    if value is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return "required"
        value = field.default_factory()
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return "`[" + ", ".join(f'"{each}"' for each in value) + "]`"
    if isinstance(value, dict):
        return "`{}`" if not value else f"`{value}`"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value}` ({value // 2**20} MiB)"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


# Verbs


def cli_page() -> str:
    """Page with the `--help` of every verb."""
    from rollmesh.cli.main import VERBS

    parts = [
        "# Command line\n",
        "Exit codes: 0 done, 1 a process failed, 2 the user can fix it (one line says how), 130 "
        "stopped by a signal. Every verb that reads settings takes `--set section.key=value`.\n",
    ]
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(help_of, [(name,) for name in VERBS]))
    for name, verb in VERBS.items():
        parts += [f"## `rollmesh {name}`\n", f"{verb.line[0].upper()}{verb.line[1:]}.\n"]
        parts += verb_help((name,))
    return "\n".join(parts)


def verb_help(words: tuple[str, ...]) -> list[str]:
    """Help of a verb and of its sub-verbs, as code blocks."""
    text = help_of(words)
    parts = [f"```text\n{text.rstrip()}\n```\n"]
    below = SUB_VERB.findall(text) if "VERB ..." in text.partition("\n")[0] else []
    for each in below or VERBS_OF.get(words, ()):
        parts += [f"### `rollmesh {' '.join((*words, each))}`\n", *verb_help((*words, each))]
    return parts


VERBS_OF = {("keys",): ("add", "export", "list", "remove"), ("trace",): ("bias",)}
"""Sub-verbs that the help of their verb does not list."""


@functools.cache
def help_of(words: tuple[str, ...]) -> str:
    """Output of `rollmesh WORDS --help`, from a separate process because some verbs re-execute."""
    ended = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli.main", *words, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "96", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        log.warning("rollmesh %s --help: %s", " ".join(words), ended.stderr.strip())
    return ended.stdout


# HTTP


def http_page() -> str:
    """Page of the routes, responses and bodies of the OpenAPI document."""
    document = msgspec.json.decode(defined("openapi_document")())
    parts = [
        "# HTTP API\n",
        "The endpoint that agents call, in a worker and in `rollmesh gateway`. Both serve this "
        "document at `/openapi.json`. The gateway's `/admin` routes are in "
        "[gateway](gateway.md#sessions).\n",
        document["info"]["description"] + "\n",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            if method in ("get", "post", "delete", "put"):
                parts += route_text(method, path, route)
    parts.append("## Bodies\n")
    for name, schema in document["components"]["schemas"].items():
        if properties := schema.get("properties"):
            rows = [
                (f"`{key}`", schema_text(each), "yes" if key in schema.get("required", ()) else "")
                for key, each in properties.items()
            ]
            head = f"### {name}\n\n{schema.get('description', '')}\n"
            parts += [head, table(("field", "type", "required"), rows)]
    return "\n".join(parts)


def route_text(method: str, path: str, route: dict[str, Any]) -> Iterator[str]:
    """Heading, request body and responses of a route."""
    yield f"## {method.upper()} `{path}`\n"
    if body := route.get("requestBody"):
        yield "Body: " + ", ".join(schema_text(each["schema"]) for each in content(body)) + "\n"
    rows = []
    for status, answer in route["responses"].items():
        kinds = ", ".join(
            f"{schema_text(each.get('schema', {}))} (`{kind}`)"
            for kind, each in answer.get("content", {}).items()
        )
        rows.append((f"`{status}`", answer.get("description", ""), kinds))
    yield table(("status", "when", "body"), rows)


def content(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The media types of a body."""
    return list(body.get("content", {}).values())


def schema_text(schema: dict[str, Any]) -> str:
    """Short description of a JSON schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(schema_text(each) for each in schema[key]))
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {schema_text(schema.get('items', {}))}"
    return str(kind)


# Metrics


def metrics_page() -> str:
    """Page of every metric that the code constructs."""
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for path in sorted((ROOT / "rollmesh").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Figure"):
                name, meaning = metric_of(call)
                where = process_of(path)
                if name:
                    sort = "counter" if name.endswith("_total") else "gauge"
                    rows[where, name] = (f"`rollmesh_{name}`", sort, meaning)
    for field in msgspec.structs.fields(defined("WorkerStatus")):
        for shown in getattr(field.type, "__metadata__", ()):
            if getattr(shown, "metric", ""):
                sort = "counter" if shown.metric.endswith("_total") else "gauge"
                name = f"`rollmesh_{shown.metric}`"
                rows["Router", shown.metric] = (name, sort, shown.help)
    parts = [
        "# Metrics\n",
        "Served in Prometheus' text format at `/metrics` of the router, of each worker, of a "
        "gateway and of the scheduler. [Memory](../explanation/memory.md) explains `held_bytes`, "
        "`entries` and `cache_entries`.\n",
    ]
    for where in dict.fromkeys(each for each, _ in sorted(rows)):
        parts += [f"## {where}\n"]
        mine = [row for (each, _), row in sorted(rows.items()) if each == where]
        parts.append(table(("metric", "kind", "meaning"), mine))
    for label, about, bounds_of in (
        ("rollmesh_held_bytes{what}", "Bytes in memory, by kind.", "HELD_BYTES"),
        ("rollmesh_entries{table}", "Entries of tables of live work, each 0 at rest.", "ENTRIES"),
        ("rollmesh_cache_entries{cache}", "Entries kept at rest.", "CACHE_ENTRIES"),
    ):
        limits = [
            (f"`{name}`", ", ".join(bound.processes), bound.limit)
            for name, bound in defined(bounds_of).items()
        ]
        parts += [f"## `{label}`\n", f"{about}\n", table(("label", "in", "bound"), limits)]
    return "\n".join(parts)


def metric_of(call: ast.Call) -> tuple[str, str]:
    """Name and help of a `Figure(name, value, about, ...)`; '' if they are not literals."""
    literals = [each.value for each in call.args if isinstance(each, ast.Constant)]
    texts = [each for each in literals if isinstance(each, str)]
    is_whole = len(texts) >= 2 and isinstance(call.args[0], ast.Constant)
    return (texts[0], texts[1]) if is_whole else ("", "")


PROCESSES = {
    "serve/router": "Router",
    "serve/server": "Worker",
    "serve/interception": "Gateway",
    "scheduler": "Scheduler",
    "runtime": "Worker and gateway",
}


def process_of(path: Path) -> str:
    """Processes that report the metrics of a file."""
    place = path.relative_to(ROOT / "rollmesh").as_posix()
    return next((name for folder, name in PROCESSES.items() if place.startswith(folder)), "All")


# Files of a run

RUN_FILES = {
    "config.json": "the settings of the run, resolved",
    "state.json": "the state of the run, the cause of a failure and the command that resumes it",
    "pids.json": "processes that launch started",
    "addresses.json": "addresses of the router, its status and the page",
    "engines.json": "engines that the operator added and removed",
    "telemetry.jsonl": "a row each second: workers, engines, queue",
    "metrics.jsonl": "a row for each train step",
    "trajectories.jsonl": "a row for each rollout that arrived, token by token",
    "drops.jsonl": "a row for each rollout that did not train, with the reason",
    "recoveries.jsonl": "a row for each restart of the trainer",
    "summary.json": "totals of the run, written at its end",
    "results.jsonl": "evaluations: a row for each rollout",
    "learning.png": "the reward by step, where matplotlib is installed",
    "journal": "folder: results and their order, for recovery",
    "weights": "folder: the newest published versions",
    "savepoints": "folder: checkpoints for resuming",
    "checkpoint": "folder: the newest model, loadable by `from_pretrained`",
    "logs": "folder: structured logs (`NAME.log`) and output (`NAME.out`) of each process",
    "keys": "folder: keys of the mesh, mode 0600",
}


def run_folder_page() -> str:
    """Page of the files of a run and the fields of their rows."""
    from rollmesh.core.types import Outcome

    source = "\n".join(path.read_text() for path in sorted((ROOT / "rollmesh").rglob("*.py")))
    for name in RUN_FILES:
        if not re.search(rf'"[^"\n]*\b{re.escape(name)}\b[^"\n]*"', source):
            log.warning("run-folder: no code writes %s", name)
    rows = [(f"`{name}`", meaning) for name, meaning in RUN_FILES.items()]
    outcomes = ", ".join(f"`{each.value}`" for each in Outcome)
    parts = [
        "# Files of a run\n",
        "A run writes these files to `run.folder`/`run.name` (`runs/mesh`), an evaluation to "
        "`runs/eval`. Folders are 0700 and files 0600; with `run.mode = 'group'` the user's group "
        "can read.\n",
        table(("name", "content"), rows),
        f"The outcome of a rollout is one of {outcomes}.\n",
    ]
    for title, target in ROWS.items():
        kind = defined(target)
        docs = field_docs(kind)
        names = [field.name for field in msgspec.structs.fields(kind)]
        fields = [(f"`{name}`", docs.get(name, "")) for name in names]
        parts += [f"## {title}\n", about(kind) + "\n", table(("field", "meaning"), fields)]
    return "\n".join(parts)


ROWS = {
    "Rows of metrics.jsonl": "StepRow",
    "Rows of trajectories.jsonl": "StoredTrajectory",
    "Rows of drops.jsonl": "DropLine",
}


@functools.cache
def defined(name: str) -> Any:
    """Class, function or constant of this name, from the module that defines it.

    KeyError if there is none. Such names are unique in the package.
    """
    pattern = re.compile(rf"^(class|def) {name}\b|^{name}\b.* = ", re.MULTILINE)
    for path in sorted((ROOT / "rollmesh").rglob("*.py")):
        if pattern.search(path.read_text()):
            module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            return getattr(importlib.import_module(module.removesuffix(".__init__")), name)
    raise KeyError(f"docs/generate.py: nothing in rollmesh is named {name}")


# Python


def python_page() -> str:
    """Page of the public names of `rollmesh`, for mkdocstrings."""
    import rollmesh

    parts = [
        "# Python API\n",
        "Everything here is imported from `rollmesh`, as in `from rollmesh import Env`.\n",
    ]
    targets = {target.partition(":")[2]: target.replace(":", ".") for target in rollmesh.TARGETS}
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [f"::: {targets.pop(name)}\n" for name in names]
    if targets:
        log.warning("python: no group has %s", ", ".join(targets))
    return "\n".join(parts)


GROUPS = {
    "Environments": (
        "Env SingleTurnEnv MultiTurnEnv ToolEnv HarnessEnv Task Transcript Score Sibling Endpoint "
        "ChatClient Outcome load_env read_tasks rounds"
    ).split(),
    "Clients": "AsyncRolloutClient SyncRolloutClient RolloutClient Finished Dropped".split(),
    "Gateway": "Gateway GatewaySession".split(),
    "Settings": "Config load_config".split(),
    "Errors": "RollmeshError UserError GroupError AgentFailed InfraError".split(),
}

PAGES = {
    "config": config_page,
    "fleet-file": fleet_page,
    "cli": cli_page,
    "http-api": http_page,
    "metrics": metrics_page,
    "run-folder": run_folder_page,
    "python": python_page,
}
