"""A forked child keeps nothing open that says that its parent lives."""

import subprocess
import sys

PROGRAM = """
import gc, os, socket, weakref
from rollmesh.core.forks import close_in_children

def is_over(other):
    other.settimeout(TIMEOUT_S)
    try:
        return other.recv(1) == b""
    except TimeoutError:
        return False

def told_by_peer_while_a_child_lives(is_kept_from_it):
    ours, other = socket.socketpair()
    if is_kept_from_it:
        close_in_children(ours)
    waiting, letting_go = os.pipe()
    if os.fork() == 0:
        os.close(letting_go)
        os.read(waiting, 1)
        os._exit(0)
    ours.close()
    over = is_over(other)
    os.close(letting_go)
    os.wait()
    return over

TIMEOUT_S = 10
print(told_by_peer_while_a_child_lives(True))
TIMEOUT_S = 0.05
print(told_by_peer_while_a_child_lives(False))
dropped = socket.socket()
close_in_children(dropped)
seen = weakref.ref(dropped)
dropped.close()
del dropped
print(seen())
"""


def test_a_child_closes_what_it_has_no_part_in_and_no_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "None"]
