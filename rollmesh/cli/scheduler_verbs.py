"""Verbs of the scheduler that ask a running one (status, explain, register, admit, kill,
unregister, drain), and `up`.

- Pipelines are admitted and killed by the admission process, which must run on this machine.
  Success is printed only once it is in the scheduler's journal.
- The fleet file gives the addresses of both processes, unless an option does.
- `up` runs the service and admission as two independent processes and restarts each. Pipelines of
  the file are registered and admitted once, when both serve for the first time.

    a child   STARTING --reports--> SERVING --exits--> STARTING, after a moment
              STARTING --exits--> all end, with its last line; one that has served starts again
"""

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from rollmesh.cli.options import add_no_keys, parser
from rollmesh.core.child_process import ManagedProcess, describe_exit, launched_environment
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.ids import new_id
from rollmesh.core.process import OK, Ready, Stop
from rollmesh.core.share import FLEET_FILE, KEYS
from rollmesh.core.text import printable
from rollmesh.launch.plan import ROLLMESH
from rollmesh.launch.screen import Terminal
from rollmesh.scheduler.admission.fleet_file import (
    FleetTables,
    admission_path,
    keys_of_fleet,
    read_fleet,
)
from rollmesh.scheduler.admission.server import DEAD, LEAVING, Registered
from rollmesh.scheduler.admission.transport import (
    AdmissionAnswer,
    SchedulerQuestion,
    ask_admission,
    ask_scheduler,
)
from rollmesh.scheduler.service.explain import FleetExplanation, PipelineView
from rollmesh.wire.frames import Buffer
from rollmesh.wire.keys import (
    KEYS_VARIABLE,
    SCHEDULER_KEYS_VARIABLE,
    new_keys,
    use_scheduler_keys,
)
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
"""Table width where stdout is not a terminal, so that lines are not cut."""


def status(argv: list[str]) -> int:
    """Show nodes and pipelines."""
    arguments = parser("scheduler status", "Show the nodes and pipelines of the fleet.")
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
    """Show why a pipeline waits, and until when."""
    arguments = parser("scheduler explain", "Show why a pipeline waits, and until when.")
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
    """Drain a node, or use it again."""
    arguments = parser("scheduler drain", "Drain a node: engines sleep and nothing starts.")
    arguments.add_argument("node", metavar="NODE")
    arguments.add_argument("--undo", action="store_true", help="use it again")
    options = _parsed(arguments, argv, "scheduler")
    if options.undo:
        _ask(options.scheduler, UndrainNode(new_id("undrain"), options.node))
        print(f"{options.node}: in use again")
    else:
        _ask(options.scheduler, DrainNode(new_id("drain"), options.node))
        print(f"{options.node}: draining; nothing starts there and its engines go to sleep")
    return OK


def register(argv: list[str]) -> int:
    """Place pipelines of the file."""
    arguments = parser("scheduler register", "Place pipelines of the fleet's file on its GPUs.")
    arguments.add_argument("pipelines", metavar="PIPELINE", nargs="*", help="default: all")
    arguments.add_argument("--admit", action="store_true", help="also admit them")
    options = _parsed(arguments, argv, "admission")
    register_pipelines(
        read_fleet(options.fleet), options.pipelines, options.admission, admits=options.admit
    )
    return OK


def admit(argv: list[str]) -> int:
    """Admit registered pipelines."""
    arguments = parser("scheduler admit", "Let pipelines request GPUs.")
    arguments.add_argument("pipelines", metavar="PIPELINE", nargs="+")
    options = _parsed(arguments, argv, "admission")
    for name in options.pipelines:
        _ask_admission(options.admission, AdmitPipeline(new_id("admit"), name))
        print(f"{name}: admitted")
    return OK


def unregister(argv: list[str]) -> int:
    """Let pipelines leave; their engines are put to sleep first."""
    arguments = parser("scheduler unregister", "Put a pipeline's engines to sleep and forget it.")
    arguments.add_argument("pipelines", metavar="PIPELINE", nargs="+")
    options = _parsed(arguments, argv, "admission")
    for name in options.pipelines:
        answer = _ask_admission(options.admission, UnregisterPipeline(new_id("leave"), name))
        is_leaving = bytes(answer.body) == LEAVING
        print(f"{name}: {'leaves when its engines are asleep' if is_leaving else 'has left'}")
    return OK


def kill(argv: list[str]) -> int:
    """Kill a pipeline's processes and free its GPUs."""
    arguments = parser("scheduler kill", "End a pipeline's processes and free its GPUs.")
    arguments.add_argument("pipeline", metavar="PIPELINE")
    arguments.add_argument(
        "--dead",
        action="store_true",
        help="assume the processes are dead; kill none (default: kill those of its run)",
    )
    options = _parsed(arguments, argv, "admission")
    question = KillPipeline(new_id("kill"), options.pipeline)
    answer = _ask_admission(options.admission, question, DEAD if options.dead else b"")
    num = msgspec.json.decode(answer.body, type=int)
    print(
        f"{options.pipeline}: {num} processes killed, and its GPUs are free; "
        f"`rollmesh scheduler admit {options.pipeline}` admits it again"
    )
    return OK


def register_pipelines(
    fleet: FleetTables, names: Sequence[str], address: str, *, admits: bool, prints: bool = True
) -> None:
    """Register pipelines of the file, all if none is named; UserError at the first refusal."""
    for name in names or fleet.pipelines:
        if name not in fleet.pipelines:
            known = ", ".join(fleet.pipelines) or "none"
            raise UserError(f"the fleet's file has no pipeline {name!r}; it has {known}")
        unplaced = PipelineSpec(pipeline_id=name, clusters={}, generation=())
        question = RegisterPipeline(new_id("register"), unplaced)
        answer = _ask_admission(address, question, msgspec.json.encode(fleet.pipelines[name]))
        if admits:
            _ask_admission(address, AdmitPipeline(new_id("admit"), name))
        if prints:
            spec = msgspec.json.decode(answer.body, type=Registered).spec
            clusters = [f"{each} on {_numbers(gpus)}" for each, gpus in spec.clusters.items()]
            generation = [f"generation on {_numbers(spec.generation)}"] * bool(spec.generation)
            print(f"{name}: {'; '.join([*clusters, *generation])}{', admitted' * admits}")


def _parsed(
    arguments: argparse.ArgumentParser, argv: list[str], process: str
) -> argparse.Namespace:
    """Parse options; addresses come from the file unless given."""
    arguments.add_argument("--fleet", type=Path, default=Path(FLEET_FILE), help=f"({FLEET_FILE})")
    what = ("PATH", "its socket") if process == "admission" else ("ADDRESS", "tcp://host:port")
    arguments.add_argument(f"--{process}", metavar=what[0], help=f"{what[1]} (default: the file's)")
    options = arguments.parse_args(argv)
    if getattr(options, process) is None:
        fleet = read_fleet(options.fleet)
        use_scheduler_keys(keys_of_fleet(fleet))
        setattr(options, process, fleet.bind if process == "scheduler" else admission_path(fleet))
    return options


def _read(options: argparse.Namespace, pipeline: str = "") -> Buffer:
    return _ask(options.scheduler, ReadScheduler(new_id("read"), pipeline)).body


def _ask(address: str, question: SchedulerQuestion, body: Buffer = b"") -> AdmissionAnswer:
    """Answer of the scheduler; UserError if it refuses."""
    return _granted(ask_scheduler(address, question, body))


def _ask_admission(path: str, question: AdmissionMessage, body: Buffer = b"") -> AdmissionAnswer:
    """Answer of the admission process at its socket; UserError if it refuses."""
    return _granted(ask_admission(Path(path), question, body))


def _granted(answer: AdmissionAnswer) -> AdmissionAnswer:
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
    """`0-3 8`: three or more adjacent numbers as a range."""
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return " ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs
    )


AGAIN_S = 0.5
START_S = 60.0
STOP_S = 10.0
LOOK_S = 0.2


class FleetProcess:
    """The service or admission, which is restarted when it dies."""

    def __init__(self, verb: str, fleet: Path) -> None:
        self._verb = verb
        self._argv = [*ROLLMESH, "scheduler", verb, str(fleet)]
        self._process: ManagedProcess | None = None
        self._restart_s = 0.0

    def start(self) -> Ready:
        """Return when the process is ready; UserError if it exits instead, or takes too long."""
        environment = launched_environment()
        self._process = ManagedProcess(self._argv, reports=True, environment=environment)
        ready = self._process.wait_ready(START_S)
        if ready is None:
            self.stop()
            raise UserError(f"{self._verb} failed to start; its output is above")
        return ready

    def restart_if_ended(self) -> None:
        """Restart the process if it has ended."""
        assert self._process is not None
        if self._process.is_running or time.monotonic() < self._restart_s:
            return
        print(f"{self._verb} ended ({describe_exit(self._process.wait())}); restarting")
        try:
            self.start()
        except UserError as error:  # it has served before: retry
            print(error)
        self._restart_s = time.monotonic() + AGAIN_S

    def stop(self) -> None:
        """Stop the process, if it runs."""
        if self._process is not None:
            self._process.stop(STOP_S)


def use_fleet_keys(folder: Path, *, has_keys: bool) -> None:
    """Create the fleet's keys if there are none; ConfigError if it has keys and must not."""
    if os.environ.get(KEYS_VARIABLE) or SCHEDULER_KEYS_VARIABLE in os.environ:
        return
    if not has_keys and folder.exists():
        raise ConfigError(f"--no-keys: the fleet has keys; remove {folder} to run without")
    if has_keys:
        if not folder.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new_keys(folder)
        use_scheduler_keys(folder)


def up(argv: list[str]) -> int:
    """Start both processes, admit all pipelines, and keep both running until stopped."""
    arguments = parser("scheduler up", "Start the service and admission, and admit all pipelines.")
    arguments.add_argument("fleet", type=Path, nargs="?", default=Path(FLEET_FILE))
    add_no_keys(arguments)
    options = arguments.parse_args(argv)
    path: Path = options.fleet
    fleet = read_fleet(path)
    use_fleet_keys(Path(fleet.journal) / KEYS, has_keys=options.has_keys)
    stop = Stop()  # both end with this process
    children = [FleetProcess("serve", path), FleetProcess("admission", path)]
    try:
        service, admission = [each.start() for each in children]
        register_pipelines(fleet, (), admission.address, admits=True)
        print(f"serves at {service.address}, {service.http_address}/status", flush=True)
        while not stop.is_asked:
            time.sleep(LOOK_S)
            for child in children:
                child.restart_if_ended()
    finally:
        for child in reversed(children):
            child.stop()
    return OK
