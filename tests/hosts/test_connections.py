"""Connections across a cut: TCP doubles the pause before each repetition, so a connection that
outlives a cut would be silent after it for about as long again.
"""

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollmesh.testing.network import HostNetwork, VirtualHost
from rollmesh.wire.keys import KEYS_VARIABLE, ONE_OF_EACH, new_keys

TALKER = str(Path(__file__).with_name("talker.py"))
CUT_S = 14.0
"""TCP repeats a packet after 0.2, 0.6, 1.4 ... 12.6, 25.4 s: this cut ends long before the last."""
SOON_S = 5.0
BEGINS_WITHIN_S = 60.0


class Talker:
    """A process on a host that prints a line for each message or answer."""

    def __init__(self, stack: ExitStack, host: VirtualHost, *argv: str, keys: str = "") -> None:
        self._process = stack.enter_context(
            host.start(
                [sys.executable, *argv],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {KEYS_VARIABLE: keys},
            )
        )
        self._news = threading.Condition()
        self._num_lines = 0
        reader = threading.Thread(target=self._read)
        reader.start()
        stack.callback(reader.join)
        stack.callback(self._process.kill)

    def next_line_s(self, timeout_s: float) -> float:
        """Return the seconds until the next line, or `timeout_s` if there is none."""
        begun_s = time.monotonic()
        with self._news:
            num_lines = self._num_lines
            self._news.wait_for(lambda: self._num_lines > num_lines, timeout_s)
        return time.monotonic() - begun_s

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if not line.startswith(b"failed"):
                with self._news:
                    self._num_lines += 1
                    self._news.notify_all()


@pytest.mark.slow
def test_messages_and_answers_arrive_soon_after_a_cut(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys", ONE_OF_EACH)
    keys = str(tmp_path / "keys")
    with HostNetwork(["one", "other"]) as network, ExitStack() as stack:
        one, other = network["one"], network["other"]
        address = f"tcp://{one.address}:5555"
        hub = Talker(stack, one, TALKER, "hub", address, keys=keys)
        Talker(stack, other, TALKER, "dialer", address, keys=keys)
        Talker(stack, one, "-m", "http.server", "8000", "--directory", str(tmp_path))
        fetcher = Talker(stack, other, TALKER, "fetcher", f"http://{one.address}:8000/")
        for each in (hub, fetcher):
            assert each.next_line_s(BEGINS_WITHIN_S) < BEGINS_WITHIN_S
        network.cut("one", "other")
        threading.Event().wait(CUT_S)
        network.heal()
        healed_s = time.monotonic()
        delays = {}
        for name, each in (("hub", hub), ("fetcher", fetcher)):
            each.next_line_s(SOON_S - (time.monotonic() - healed_s))
            delays[name] = time.monotonic() - healed_s
        assert max(delays.values()) < SOON_S, delays
