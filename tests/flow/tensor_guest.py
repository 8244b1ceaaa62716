"""A consumer among others that looks at shards for a while, and says whether they are whole.

A whole shard is full of its own length, see `filling_of`. Each line on stdin, a pack of handles in
hex, is answered by one: how many shards it sees, or `broken` where one of them is not whole. Of the
handles it fetches some, and of what it has seen it keeps some, by the seed that is its argument; at
an empty pack it lets go of all. Driven by test_tensor_crowd.py.
"""

import random
import sys
from contextlib import closing

from rollmesh.core.errors import ShardMissing
from rollmesh.tensors.handles import Content, unpack
from rollmesh.tensors.peers import Peers


def filling_of(num_bytes: int) -> int:
    """What a shard of this length is full of."""
    return num_bytes % 251


def is_whole(content: Content) -> bool:
    """Whether nothing else was written there."""
    return bool((content.data == filling_of(content.data.nbytes)).all())


def main() -> None:
    """Until there are no more lines."""
    chance, seen = random.Random(int(sys.argv[1])), list[Content]()
    with closing(Peers()) as peers:
        for line in sys.stdin:
            handles = unpack(bytes.fromhex(line))
            seen = chance.sample(seen, len(seen) // 2) if handles else []
            some = chance.choices(handles, k=len(handles))
            try:
                if some:
                    seen += peers.fetch(some[0].owner, some)
            except ShardMissing:  # it was freed on our way
                pass
            told = str(len(seen)) if all(map(is_whole, seen)) else "broken"
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
