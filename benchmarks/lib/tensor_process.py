"""One process of the tensor benchmark: the owner or the consumer of an arm.

    python -m benchmarks.lib.tensor_process owner|consumer ARM --fd N

- One line of JSON per request, one per answer (tensor_protocol.py).
- Only the arm's work is timed: arrays are made, handles unpacked and contents checked outside of
  it.
- A consumer holds what it fetched until the step ends, as a train step would.
"""

import argparse
import gc
import importlib
import socket
import time
from contextlib import closing
from typing import Any

import msgspec

from benchmarks.lib.tensor_protocol import (
    ARMS,
    Ask,
    BatchStored,
    Consumer,
    EndStepRequest,
    Fetched,
    FetchRequest,
    HeldBytes,
    Publish,
    Stored,
    TensorOwner,
    digest,
    digest_of,
    make,
)
from rollmesh.core.process import die_with_parent


class OwnerParty:
    """Answers requests for an owner."""

    def __init__(self, owner: TensorOwner) -> None:
        self._owner = owner

    def answer(self, ask: Ask) -> msgspec.Struct:
        """Carry out a request and return its answer."""
        match ask:
            case Publish():
                return self._publish(ask)
            case EndStepRequest(step):
                self._owner.end_step(step)
        return with_cpu_time(self._owner.held())

    def _publish(self, ask: Publish) -> BatchStored:
        pieces = make(ask.batch, ask.seed)
        self._owner.prepare(pieces)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        self._owner.publish()
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        stored = self._owner.take(ask.step)
        num_bytes = sum(each.data.nbytes for each in pieces)
        return BatchStored(*stored, num_bytes, digest_of(pieces), took_s, cpu_s)


class ConsumerParty:
    """Answers requests for a consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._arrays: list[Any] = []

    def answer(self, ask: Ask) -> msgspec.Struct:
        """Carry out a request and return its answer."""
        match ask:
            case FetchRequest():
                return self._fetch(ask)
            case EndStepRequest(step):
                self._arrays = []
                self._consumer.end_step(step)
        return with_cpu_time(self._consumer.held())

    def _fetch(self, ask: FetchRequest) -> Fetched:
        items = self._consumer.prepare(Stored(ask.address, ask.handles))
        calls = [[item] for item in items] if ask.one_by_one else [items]
        took_s: list[float] = []
        cpu_s = time.process_time()
        for call in calls:
            began_s = time.perf_counter()
            arrays = self._consumer.fetch(call)
            took_s.append(time.perf_counter() - began_s)
            self._arrays += arrays
        cpu_s = time.process_time() - cpu_s
        found, read_s = self._read()
        return Fetched(took_s, cpu_s, found, read_s)

    def _read(self) -> tuple[int, float]:
        began_s = time.perf_counter()
        found = digest(map(self._consumer.sum_of, self._arrays))
        return found, time.perf_counter() - began_s


def with_cpu_time(held: HeldBytes) -> HeldBytes:
    """Add the current CPU time."""
    return msgspec.structs.replace(held, cpu_s=time.process_time())


def half(role: str, arm: str) -> Any:
    """Make an arm's owner or consumer; only its own module is imported.

    For example, `consumer` and `raw_warm` give a RawWarmConsumer.
    """
    module, _, name = ARMS[arm].partition(":")
    return getattr(importlib.import_module(f"benchmarks.lib.{module}"), name + role.capitalize())()


def main() -> None:
    """Answer requests until the connection closes."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.tensor_process")
    arguments.add_argument("role", choices=["owner", "consumer"])
    arguments.add_argument("arm", choices=ARMS)
    arguments.add_argument("--fd", type=int, required=True)
    options = arguments.parse_args()
    die_with_parent()
    mine = half(options.role, options.arm)
    # As rollmesh's processes do: without it, collections of what torch loads would add to the tail.
    gc.collect()
    gc.freeze()
    is_owner = options.role == "owner"
    party: OwnerParty | ConsumerParty = OwnerParty(mine) if is_owner else ConsumerParty(mine)
    end = socket.socket(fileno=options.fd)
    with closing(mine), end, end.makefile("rwb") as stream:
        for line in stream:
            answer = party.answer(msgspec.json.decode(line, type=Ask))
            stream.write(msgspec.json.encode(answer) + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
