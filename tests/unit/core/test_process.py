"""A process that is asked to stop does so in its own time; asked again, it ends at once."""

import signal
import subprocess
import sys

import pytest

ENDS_WITHIN_S = 10.0
LINGERS = """
import asyncio
from rollmesh.core.process import stop_event

async def main():
    stop = stop_event(asyncio.get_running_loop())
    print("serves", flush=True)
    await stop.wait()
    print("drains", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_second_ends_at_once(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", LINGERS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "serves\n"
        process.send_signal(number)
        assert process.stdout.readline() == "drains\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(ENDS_WITHIN_S) == 1


HELD = """
import asyncio, sys
import uvloop
from rollmesh.core.process import stop_event

async def main():
    stop_event(asyncio.get_running_loop())
    print("serves", flush=True)
    while True:  # nobody else has a turn
        pass

run = uvloop.run if sys.argv[1] == "uvloop" else asyncio.run
run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_second_signal_ends_a_process_whose_loop_is_held(loop: str) -> None:
    argv = [sys.executable, "-c", HELD, loop]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "serves\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # another, since two of a kind may count as one
        try:
            assert process.wait(ENDS_WITHIN_S) == 1
        finally:
            process.kill()
