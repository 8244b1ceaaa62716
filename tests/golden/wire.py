"""One sample of every message, and the file that freezes their bytes.

    python -m tests.golden.wire     writes wire.txt; only together with a new PROTOCOL, or
                                    when a field with a default was appended

Samples differ from every default, so that a moved or lost field shows.
"""

import types
import typing
from pathlib import Path

from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace
from rollmesh.wire import fleet as f
from rollmesh.wire import messages as m
from rollmesh.wire import ranks as r
from rollmesh.wire import scheduling as s
from rollmesh.wire.frames import Packet, encode

FILE = Path(__file__).with_name("wire.txt")
GROUP = GroupId("r7f3a9c1", 300)
TICKET = bytes(range(1, 17))
ENGINE = f.EngineRow("http://e:1", "i1", f.EnginePhase.READY, 12, 3, 4, "busy", "a12", 64)
SPEC = s.PipelineSpec(
    pipeline_id="p1",
    clusters={"actor_train": (0, 1)},
    generation=(0, 1, 2, 3),
    tp=2,
    weight=2.5,
    max_gpus=4,
    min_gpus=2,
    is_preemptible=False,
    rollouts_per_worker=64,
)
TRUTH = s.WorkerTruth(1, s.WorkerPhase.LOST, 7, 4096, "no answer")
HELD = r.HeldTensors(4, 4096, 512, ((-1, 1024), (18, 3072)))

SAMPLES: tuple[m.AnyMessage, ...] = (
    m.ClientHello("c1", 3, True),
    m.ClientBeat("c1", 7),
    m.ClientLeft("c1"),
    m.AskGroup(GROUP, "c1", "guess", 16, "tcp://h:1", 2, -2, 90.5, 1, TICKET),
    m.CancelGroup(GROUP, "stale", b"ticket of group."),
    m.AttemptFailed(GROUP, 2, "worker-0", "malformed result"),
    m.ResultRefused(GROUP, 2, "malformed result"),
    m.RouterHello(0.5),
    m.GroupMoved(GROUP, m.GroupState.QUEUED, 2, "worker-0", 1, "no worker serves env 'x'"),
    m.GroupFailed(GROUP, "attempts_exhausted: 3 have begun"),
    m.AskRefused(GROUP, "overloaded", 1.5),
    m.RunGroup(GROUP, 2, 16, "tcp://h:1", 90.5, TICKET),
    m.CancelRun(GROUP, "stale"),
    f.FleetChanged(9, (ENGINE,), 12, False),
    f.EnginesChanged(9, 7, (ENGINE,), ("http://e:2",), 12, False),
    f.LoadsChanged(9, (1, 300), (0, 70000)),
    f.TableDigest(9, 3000000000, (7, 0)),
    f.AskTable(),
    f.PublisherLeft(),
    m.DrainWorker("update"),
    m.WorkerHello(
        "worker-0",
        "guess",
        64,
        4711,
        "node-3",
        (m.HeldGroup(GROUP, 2, True),),
        1.5e9,
        100.0,
        "d2dacdd2/pid:[4026531836]",
        2**28,
    ),
    m.WorkerBeat(
        "worker-0",
        5,
        False,
        1024,
        0.25,
        65536,
        10,
        20,
        300,
        "run (my_env.py:7)",
        "draining",
        2,
        "no",
        1.5e9,
        3,
        "worker.max_held_bytes",
        2048,
        ErrorPlace("ValueError", "/h/my_env.py", 15, "score"),
        "t7",
        "bwrap",
    ),
    m.WorkerLeft("worker-0", "drained", 4711, 1.5e9),
    m.GroupStarted(GROUP, 2),
    m.GroupDelivered(GROUP, 2, b"ticket of group."),
    m.GroupReturned(GROUP, 2, "draining"),
    m.GroupLost(GROUP, 2, "no ack in 600 s"),
    m.EnvFailed("worker-0", "guess", "no module named x", 4711, 1.5e9),
    f.EngineFaulted("http://e:1", "i1", "stream cut"),
    m.GroupFinished(GROUP, 2, "worker-0", True, TICKET),
    m.GroupAcked(GROUP, 2, True),
    f.JoinEngine(3, "http://e:1"),
    f.BeginUpdate(3, "http://e:1", 12, 30.0, "c5d1e"),
    f.FinishUpdate(3, "http://e:1", 12, True, "done", "a12"),
    f.SleepEngine(3, "http://e:1", 30.0),
    f.WakeEngine(3, "http://e:1", 12, "a12"),
    f.FenceEngine(3, "http://e:1", 12, "off by 0.5"),
    f.RemoveEngine(3, "http://e:1"),
    f.ReadFleet(3, 12),
    f.FleetAnswered(3, False, "unknown", 9, (ENGINE,), 13),
    f.AddEngine(3, "http://e:1", True),
    f.DropEngine(3, "http://e:1", True, True, True),
    f.ListEngines(3),
    f.EnginesListed(3, (ENGINE,), (f.EngineOrigin.ADDED,), True, True, "/m", 4096),
    m.WorkerExited("worker-0", 4711, "killed by signal 9", 1.5e9),
    m.AskDrain(3, "worker-0", "update"),
    m.AskAddresses(7),
    m.AskMesh(7),
    m.MeshAnswered(7, ("http://10.0.0.5:30000",), "/runs/mesh", "5d1e", 1.5),
    m.AddressesAnswered(7, "tcp://127.0.0.1:5555", "http://127.0.0.1:8000"),
    m.DrainAnswered(3, False, "no worker-0"),
    m.GroupNews((m.GroupStarted(GROUP, 2), m.GroupDelivered(GROUP, 2, b"ticket of group."))),
    r.RankHello(3, 4711, "host-b", "cuda", "1f", "10.0.0.1:5"),
    r.RankReady(3, "tcp://h:1"),
    r.RankBeat(3, 17, 40),
    r.RankLeft(3, "sigterm"),
    r.FormGroup(17, "10.0.0.1:5"),
    r.ControllerBeat(17, 40),
    r.EndRank(17, "done"),
    r.AbortRank(17, "rank 3 is gone"),
    r.StageCall(17, 5, "actor", "train", 18),
    r.RunCall(17, 5),
    r.DropCall(17, 5),
    r.CallStaged(3, 5, "shard 1 is cleared"),
    r.CallEnded(3, 5, "ValueError: no"),
    r.ReadTensors(17, 6),
    r.TensorsReported(3, 6, 17, 2, HELD, HELD, "owner gone"),
    s.HooksWired("p1", "t"),
    s.RequestGpus("k1", "p1", "actor_train", 1, 5, 128, "t"),
    s.NotifyReleaseGpus("k1", "p1", "actor_train", 5, "t"),
    s.NotifyReleaseThenRequestGpus("k1", "p1", "actor_train", "actor_infer", 6, 5, 6, 128, "t"),
    s.TakeGpus("k1", 7, "t"),
    s.WithdrawRequest("k1", "t"),
    s.ReportProgress("p1", "train", 6, 128, 17, "t"),
    s.ClearProgress("p1", "train", 6, "t"),
    s.ReportPreempt("p1", 1, "http://e:1", "t"),
    s.TicketMoved("k1", s.TicketState.GRANTED, (0, 1), "held", 7),
    s.SchedulerHello("s5d1e", 1.5e9, 7, "no token"),
    s.CoordinatorHello("p1", (TRUTH,), 1.5e9, "t"),
    s.ResizeWorkers("p1", 9, (s.WorkerChange(1, True, 7),), 120.0, 1.5e9, 10.0),
    s.WorkersResized("p1", 9, (TRUTH,), "no answer", "t"),
    s.RegisterPipeline("k1", SPEC, "t", "h"),
    s.AdmitPipeline("k1", "p1", "t"),
    s.CheckKill("k1", "p1", "m2", "t"),
    s.KillPipeline("k1", "p1", "m2", "t"),
    s.UnregisterPipeline("k1", "p1", "t"),
    s.ClaimPipeline("k1", "p1", s.RunClaim("m2", "h", 4711, "b/1", "99", False, "/r"), "m1", "t"),
    s.JoinNode("k1", "node-3", 8, ("h200",), False),
    s.NodeBeat("node-3"),
    s.DrainNode("k1", "node-3"),
    s.UndrainNode("k1", "node-3"),
    s.ReadScheduler("k1", "p1"),
    s.SchedulerAnswered("k1", False, "no p1"),
)


def kinds() -> set[type]:
    """Every type of message that may cross a socket."""
    found: set[type] = set()
    waiting: list[object] = [m.AnyMessage]
    while waiting:
        each = waiting.pop()
        if isinstance(each, types.UnionType) or typing.get_origin(each) is typing.Union:
            waiting += typing.get_args(each)
        else:
            assert isinstance(each, type)
            found.add(each)
    return found


def frozen(message: m.AnyMessage) -> str:
    """One line of the file: the name and the header frame in hex."""
    header, _ = encode(Packet(message, "i5d1e"))
    return f"{type(message).__name__} {bytes(header).hex()}"


def main() -> None:
    """Write the file."""
    FILE.write_text("".join(f"{frozen(message)}\n" for message in SAMPLES))


if __name__ == "__main__":
    main()
