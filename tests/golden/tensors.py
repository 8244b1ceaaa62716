"""One sample of every message between a tensor owner and its consumer, and their frozen bytes.

    python -m tests.golden.tensors     writes tensors.txt; only with a new PROTOCOL in
                                       tensors/frames.py, or a new field that has a default

Samples differ from every default, so that a moved or lost field shows.
"""

import typing
from pathlib import Path

from rollmesh.tensors import frames as f

FILE = Path(__file__).with_name("tensors.txt")
NONCE = bytes(range(f.NONCE_BYTES))
IDS, RETURNED = f.pack_numbers([(7 << 32) + 1, 2**63 - 1]), f.pack_numbers([(7 << 32) + 2])

SAMPLES: tuple[f.Request | f.Answer, ...] = (
    f.Hello(f.PROTOCOL, NONCE),
    f.KeyProof(NONCE, "3f0b/27/1", "tcp://h:1"),
    f.Fetch(IDS, True, RETURNED, True),
    f.FetchForPeer(b"pack", RETURNED),
    f.Clear(IDS, RETURNED),
    f.TakeShards(IDS, 7, RETURNED),
    f.EndStep(7, RETURNED),
    f.Returned(RETURNED),
    f.Welcome(f.PROTOCOL, NONCE, NONCE),
    f.Admitted("3f0b/27/1", "/dev/shm"),
    f.Lent(
        ["/dev/shm/rollmesh-0-ab"],
        f.pack_numbers([0, 0]),
        f.pack_numbers([0, 64]),
        f.pack_numbers([64, 10]),
    ),
    f.Sent(f.pack_numbers([64, 10])),
    f.FetchElsewhere("tcp://h:1"),
    f.ShardsTaken(),
    f.Cleared(2),
    f.Missing((7 << 32) + 1, "cleared"),
    f.Refused("why"),
)


def name_of(message: f.Request | f.Answer) -> str:
    """Return the name of a message in the file: its tag."""
    return str(message.__struct_config__.tag).capitalize()


def kinds() -> set[type]:
    """Every type of message between them."""
    return {*typing.get_args(f.Request), *typing.get_args(f.Answer)}


def main() -> None:
    """Write the file."""
    lines = (f"{name_of(each)} {f.frame(each).hex()}\n" for each in SAMPLES)
    FILE.write_text("".join(lines))


if __name__ == "__main__":
    main()
