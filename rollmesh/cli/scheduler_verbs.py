"""The scheduler's verbs that ask: status, explain, register, admit, kill, unregister, drain.

- What the service reports is shown as it is.
- Pipelines are admitted and killed by the admission process, which must run on this machine; each
  is printed as done only once it is in the scheduler's journal.
- The fleet's file names the addresses of both, unless an option does.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from rollmesh.cli.options import parser
from rollmesh.core.errors import UserError
from rollmesh.core.ids import new_id
from rollmesh.core.process import OK
from rollmesh.core.share import FLEET_FILE
from rollmesh.core.text import printable
from rollmesh.launch.screen import Terminal
from rollmesh.scheduler.admission.asking import Answer, Question, ask
from rollmesh.scheduler.admission.desk import DEAD, LEAVING, Registered
from rollmesh.scheduler.admission.door import ask_admission
from rollmesh.scheduler.admission.fleet_file import (
    FleetTables,
    admission_path,
    keys_of_fleet,
    read_fleet,
)
from rollmesh.scheduler.service.explain import FleetExplanation, PipelineView
from rollmesh.wire.frames import Buffer
from rollmesh.wire.keys import use_scheduler_keys
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    AdmitPipeline,
    DrainNode,
    KillPipeline,
    PipelineSpec,
    ReadScheduler,
    RegisterPipeline,
    UndrainNode,
    UnregisterPipeline,
    WorkerPhase,
)

PIPE_WIDTH = 200
"""Where stdout is no terminal, lines are cut for no one."""


def status(argv: list[str]) -> int:
    """Nodes and pipelines."""
    arguments = parser("scheduler status", "Say how the fleet stands: its nodes and pipelines.")
    arguments.add_argument("--json", dest="is_json", action="store_true", help="one JSON line")
    options = _parsed(arguments, argv, "scheduler")
    raw = _read(options)
    if options.is_json:
        print(bytes(raw).decode())
        return OK
    seen = msgspec.json.decode(raw, type=FleetExplanation)
    num_gpus = sum(len(node.gpus) for node in seen.nodes)
    print(f"scheduler {seen.scheduler}: {seen.policy}, {seen.num_free} of {num_gpus} GPUs free")
    width = None if Terminal().is_terminal else PIPE_WIDTH
    console = Terminal(highlight=False, width=width)
    if seen.nodes:
        rows = [
            (node.name, node.phase.value, _numbers(node.gpus), " ".join(node.labels))
            for node in seen.nodes
        ]
        console.print(_table(("node", "phase", "GPUs", "labels"), rows))
    if seen.pipelines:
        head = ("pipeline", "phase", "awake", "left", "holds", "waits for")
        console.print(_table(head, [_row(each) for each in seen.pipelines]))
    for trouble in seen.troubles:
        print(printable(trouble))
    return OK


def explain(argv: list[str]) -> int:
    """Why a pipeline waits, and until what."""
    arguments = parser("scheduler explain", "Say why a pipeline waits, and until what.")
    arguments.add_argument("pipeline", metavar="PIPELINE")
    arguments.add_argument("--json", dest="is_json", action="store_true", help="one JSON line")
    options = _parsed(arguments, argv, "scheduler")
    raw = _read(options, options.pipeline)
    seen = msgspec.json.decode(raw, type=FleetExplanation)
    if seen.error:
        raise UserError(seen.error)
    if options.is_json:
        print(bytes(raw).decode())
    else:
        for each in seen.pipelines:
            lines = [*each.lines, *(f"lately: {line}" for line in each.lately)]
            print("\n".join(map(printable, lines)))
    return OK


def drain(argv: list[str]) -> int:
    """Let a node run empty, or use it again."""
    arguments = parser("scheduler drain", "Start nothing new on a node; what sleeps stays asleep.")
    arguments.add_argument("node", metavar="NODE")
    arguments.add_argument("--undo", action="store_true", help="use it again")
    options = _parsed(arguments, argv, "scheduler")
    if options.undo:
        _ask(options.scheduler, UndrainNode(new_id("undrain"), options.node))
        print(f"{options.node}: it is used again")
    else:
        _ask(options.scheduler, DrainNode(new_id("drain"), options.node))
        print(f"{options.node}: nothing new starts there; what generates there goes to sleep")
    return OK


def register(argv: list[str]) -> int:
    """Place pipelines of the file."""
    arguments = parser("scheduler register", "Place pipelines of the fleet's file on its GPUs.")
    arguments.add_argument("pipelines", metavar="PIPELINE", nargs="*", help="all, if left out")
    arguments.add_argument("--admit", action="store_true", help="and let them in")
    options = _parsed(arguments, argv, "admission")
    enrol(read_fleet(options.fleet), options.pipelines, options.admission, admits=options.admit)
    return OK


def admit(argv: list[str]) -> int:
    """Let pipelines in that are registered."""
    arguments = parser("scheduler admit", "Let pipelines ask for GPUs.")
    arguments.add_argument("pipelines", metavar="PIPELINE", nargs="+")
    options = _parsed(arguments, argv, "admission")
    for name in options.pipelines:
        _ask_admission(options.admission, AdmitPipeline(new_id("admit"), name))
        print(f"{name}: admitted")
    return OK


def unregister(argv: list[str]) -> int:
    """Let pipelines go: their engines are put to sleep first."""
    arguments = parser("scheduler unregister", "Put a pipeline's engines to sleep and forget it.")
    arguments.add_argument("pipelines", metavar="PIPELINE", nargs="+")
    options = _parsed(arguments, argv, "admission")
    for name in options.pipelines:
        answer = _ask_admission(options.admission, UnregisterPipeline(new_id("leave"), name))
        is_leaving = bytes(answer.body) == LEAVING
        print(f"{name}: {'leaves when its engines are asleep' if is_leaving else 'has left'}")
    return OK


def kill(argv: list[str]) -> int:
    """End a pipeline's processes, and free what it had."""
    arguments = parser("scheduler kill", "End a pipeline's processes and free its GPUs.")
    arguments.add_argument("pipeline", metavar="PIPELINE")
    arguments.add_argument(
        "--dead",
        action="store_true",
        help="assume that its processes have ended, and end none (default: end those of its run)",
    )
    options = _parsed(arguments, argv, "admission")
    question = KillPipeline(new_id("kill"), options.pipeline)
    answer = _ask_admission(options.admission, question, DEAD if options.dead else b"")
    num = msgspec.json.decode(answer.body, type=int)
    print(
        f"{options.pipeline}: {num} processes ended, and its GPUs are free; "
        f"`rollmesh scheduler admit {options.pipeline}` lets it in again"
    )
    return OK


def enrol(
    fleet: FleetTables, names: Sequence[str], address: str, *, admits: bool, is_told: bool = True
) -> None:
    """Register pipelines of the file, all where none is named; UserError at the first refusal."""
    for name in names or fleet.pipelines:
        if name not in fleet.pipelines:
            known = ", ".join(fleet.pipelines) or "none"
            raise UserError(f"the fleet's file has no pipeline {name!r}; it has {known}")
        unplaced = PipelineSpec(pipeline_id=name, clusters={}, generation=())
        question = RegisterPipeline(new_id("register"), unplaced)
        answer = _ask_admission(address, question, msgspec.json.encode(fleet.pipelines[name]))
        if admits:
            _ask_admission(address, AdmitPipeline(new_id("admit"), name))
        if is_told:
            spec = msgspec.json.decode(answer.body, type=Registered).spec
            clusters = [f"{each} on {_numbers(gpus)}" for each, gpus in spec.clusters.items()]
            generation = [f"generation on {_numbers(spec.generation)}"] * bool(spec.generation)
            print(f"{name}: {'; '.join([*clusters, *generation])}{', admitted' * admits}")


def _parsed(arguments: argparse.ArgumentParser, argv: list[str], whom: str) -> argparse.Namespace:
    """With where they are, from the file unless an option says it."""
    arguments.add_argument("--fleet", type=Path, default=Path(FLEET_FILE), help=f"({FLEET_FILE})")
    what = ("PATH", "its socket") if whom == "admission" else ("ADDRESS", "tcp://host:port")
    arguments.add_argument(f"--{whom}", metavar=what[0], help=f"{what[1]}; else the file's")
    options = arguments.parse_args(argv)
    if getattr(options, whom) is None:
        fleet = read_fleet(options.fleet)
        use_scheduler_keys(keys_of_fleet(fleet))
        setattr(options, whom, fleet.bind if whom == "scheduler" else admission_path(fleet))
    return options


def _read(options: argparse.Namespace, pipeline: str = "") -> Buffer:
    return _ask(options.scheduler, ReadScheduler(new_id("read"), pipeline)).body


def _ask(address: str, question: Question, body: Buffer = b"") -> Answer:
    """The scheduler's answer; UserError where it refuses."""
    return _granted(ask(address, question, body))


def _ask_admission(path: str, question: AdmissionMessage, body: Buffer = b"") -> Answer:
    """The answer of admission at its socket; UserError where it refuses."""
    return _granted(ask_admission(Path(path), question, body))


def _granted(answer: Answer) -> Answer:
    if not answer.ok:
        raise UserError(answer.error)
    return answer


def _row(pipeline: PipelineView) -> tuple[str, ...]:
    awake = sum(each.phase is WorkerPhase.AWAKE for each in pipeline.workers)
    absent = sum(each.phase is WorkerPhase.ABSENT for each in pipeline.workers)
    coming = f", {absent} not up yet" if absent else ""
    left = "" if not pipeline.has_demand else str(pipeline.remaining or "?")
    return (
        pipeline.pipeline_id,
        pipeline.phase.value,
        f"{awake} of {len(pipeline.workers)}{coming}",
        left,
        " ".join(pipeline.holds),
        " ".join(each.cluster for each in pipeline.waits),
    )


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(*headings, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _numbers(gpus: Sequence[int]) -> str:
    """`0-3 8`, where three or more are neighbours."""
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return " ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs
    )
