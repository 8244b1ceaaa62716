"""A consumer that checks shards and reports whether they are intact.

An intact shard is full of the byte of its own length, see `filling_of`. Each line on stdin, a pack
of handles in hex, is answered by one line: the number of shards that it sees, or `broken` if one is
not intact. The seed in its argument decides which handles it fetches and which shards it keeps; an
empty pack releases all. Used by test_tensor_crowd.py.
"""

import random
import sys
from contextlib import closing

from rollmesh.core.errors import ShardMissing
from rollmesh.tensors.handles import Content, unpack
from rollmesh.tensors.peers import Peers


def filling_of(num_bytes: int) -> int:
    """The byte that fills a shard of this length."""
    return num_bytes % 251


def is_whole(content: Content) -> bool:
    """Whether the content is unchanged."""
    return bool((content.data == filling_of(content.data.nbytes)).all())


def main() -> None:
    """Answer lines until stdin ends."""
    chance, seen = random.Random(int(sys.argv[1])), list[Content]()
    with closing(Peers()) as peers:
        for line in sys.stdin:
            handles = unpack(bytes.fromhex(line))
            seen = chance.sample(seen, len(seen) // 2) if handles else []
            some = chance.choices(handles, k=len(handles))
            try:
                if some:
                    seen += peers.fetch(some[0].owner, some)
            except ShardMissing:  # freed by its owner before the fetch
                pass
            answer = str(len(seen)) if all(map(is_whole, seen)) else "broken"
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
