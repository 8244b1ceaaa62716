"""Cases of the tensor benchmark between owners and consumers.

    big        294 MiB in 32 arrays: publish beside memcpy, fetch beside a bare socket
    small      33 MiB in 2,048 arrays
    tiny       1 KiB, one fetch for each
    fanout     eight consumers on one host, the owner's or another, fetch `big` at once
    handles    2,048 of them, packed and unpacked

- Ratios are between consecutive laps, figures are medians over the rounds, CPU is the least of them
  (`by_cpu` is the ratio that other work on the machine disturbs less).
- Socket traffic is counted by the loopback device, including that of other processes.
"""

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median

from benchmarks.lib.http_load import percentile
from benchmarks.lib.process_watch import private_bytes
from benchmarks.lib.tensor_mesh import Party, StepTimes, TensorBench, check, fetch_of, settle
from benchmarks.lib.tensor_protocol import BatchStored, EndStepRequest, Fetched, HeldBytes, Publish
from rollmesh.tensors.handles import UNTAGGED, RTensor, pack, unpack

NUM_CONSUMERS = 8
NUM_HANDLES = 2_048


def big(bench: TensorBench) -> None:
    """294 MiB: times, the consumer's memory, and the time to read the batch."""
    for name, laps in _compare(bench, "big").items():
        bench.note(f"big.{name}", {
            "first_read_ms": 1e3 * laps[0].fetched.read_s,
            "read_ms": 1e3 * median(lap.fetched.read_s for lap in laps[1:]),
            "peak_vs_payload": max(lap.peak_bytes / lap.num_bytes for lap in laps),
        })  # fmt: skip


def small(bench: TensorBench) -> None:
    """2,048 shards."""
    _compare(bench, "small")


def tiny(bench: TensorBench) -> None:
    """The latency of one fetch."""
    for name, (_, *laps) in bench.rounds("tiny", one_by_one=True).items():
        took_s = [each for lap in laps for each in lap.fetched.took_s]
        bench.note(f"tiny.{name}", {
            "p50_ms": 1e3 * median(took_s),
            "p99_ms": 1e3 * percentile(took_s, 99),
            "cpu_us": 1e6 * min(lap.cpu_s / len(lap.fetched.took_s) for lap in laps),
        })  # fmt: skip


def _compare(bench: TensorBench, case: str) -> dict[str, list[StepTimes]]:
    """Run a batch through every arm and the baselines; return all laps, including the warm-up."""
    all_laps = bench.rounds(case)
    laps = {name: mine[1:] for name, mine in all_laps.items()}
    for name, mine in laps.items():
        bench.note(f"{case}.{name}", {
            "fetch_ms": 1e3 * median(lap.fetch_s for lap in mine),
            "cpu_ms": 1e3 * min(lap.cpu_s for lap in mine),
        })  # fmt: skip
    raw, warm, shm, tcp = (laps[name] for name in ("raw", "raw_warm", "shm", "tcp"))
    bench.note(case, {
        "memcpy_ms": 1e3 * median(lap.publish_s for lap in raw),
        "publish_ms": 1e3 * median(lap.publish_s for lap in shm),
        "publish_vs_memcpy": _ratio(raw, shm, attrgetter("publish_s")),
        "publish_vs_memcpy.by_cpu": _ratio(raw, shm, attrgetter("publish_cpu_s")),
        "tcp_vs_raw": _ratio(raw, tcp, attrgetter("fetch_s")),
        "tcp_vs_raw_warm": _ratio(warm, tcp, attrgetter("fetch_s")),
        "tcp_vs_raw_warm.by_cpu": _ratio(warm, tcp, attrgetter("cpu_s")),
        "tcp_vs_pioneer": _ratio(laps["pioneer"], tcp, attrgetter("fetch_s")),
        "shm_vs_pioneer": _ratio(laps["pioneer"], shm, attrgetter("fetch_s")),
    })  # fmt: skip
    return all_laps


def _ratio(
    slow: Sequence[StepTimes], fast: Sequence[StepTimes], of: Callable[[StepTimes], float]
) -> float:
    """Note speed-ups of neighbouring laps; the pioneer has fewer laps."""
    return median(of(a) / of(b) for a, b in zip(slow, fast, strict=False))


def fanout(bench: TensorBench) -> None:
    """Let eight consumers fetch the same batch, beside the owner and on another host.

    Notes socket traffic and the private memory of each consumer.
    """
    for arm in ("shm", "remote"):
        owner = bench.party("owner", arm)
        consumers = [bench.party("consumer", arm) for _ in range(NUM_CONSUMERS)]
        num_rounds = 3 if bench.is_quick else 7
        rounds = [_fan_out(bench, owner, consumers) for _ in range(1 + num_rounds)]
        over_sockets, private, fetch_s = zip(*rounds[1:], strict=True)
        bench.note(f"fanout.{arm}", {
            "fetch_ms": 1e3 * median(fetch_s),
            "over_sockets_vs_payload": median(over_sockets),
            "private_memory_vs_payload": median(private),
        })  # fmt: skip
        for party in (*consumers, owner):
            party.end()


def _fan_out(
    bench: TensorBench, owner: Party, consumers: list[Party]
) -> tuple[float, float, float]:
    step = next(bench.steps)
    published = owner.ask(Publish("big", step, step), BatchStored)
    private, received = _private_bytes(consumers), _received_bytes()
    for each in consumers:
        each.send(fetch_of(published))
    fetched = [each.receive(Fetched) for each in consumers]
    received = _received_bytes() - received
    private = _private_bytes(consumers) - private
    for each, got in zip(consumers, fetched, strict=True):
        check(got, published, each)
        each.ask(EndStepRequest(step), HeldBytes)
    owner.ask(EndStepRequest(step), HeldBytes)
    settle(owner)
    slowest_s = max(sum(each.took_s) for each in fetched)
    return received / published.num_bytes, private / published.num_bytes, slowest_s


def _private_bytes(parties: Sequence[Party]) -> int:
    """Total private memory of the consumers."""
    return sum(private_bytes(each.pid) for each in parties)


def _received_bytes() -> int:
    """Bytes through the loopback device so far; proc_pid_net(5)."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    [line] = [each for each in lines if each.lstrip().startswith("lo:")]
    return int(line.partition(":")[2].split()[0])


def handles(bench: TensorBench) -> None:
    """Pack and unpack a batch's handles as one message; the fastest of many rounds."""
    incarnation, owner = 7, "tcp://127.0.0.1:41234"
    made = [
        RTensor(
            incarnation << 32 | number, owner, UNTAGGED, "int32", (4_000 + number % 300,), 16_000
        )
        for number in range(NUM_HANDLES)
    ]
    packed = pack(made)
    assert unpack(packed) == made
    bench.note("handles", {
        "pack_ms": 1e3 * _best_s(lambda: pack(made)),
        "unpack_ms": 1e3 * _best_s(lambda: unpack(packed)),
        "bytes_each": len(packed) / NUM_HANDLES,
    })  # fmt: skip


def _best_s(run: Callable[[], object]) -> float:
    """CPU time of a call; the least, since other work on the machine can only add to it."""
    best_s = float("inf")
    for _ in range(200):
        began_s = time.thread_time()
        run()
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s
