"""Takes the pulse of a run whose processes launch did not start, as where each has a container.

Owns one thread, beside the process that it runs in: a line of telemetry.jsonl each second, with the
router's word and this process's memory. Invariants: a router that does not answer leaves a gap,
never an error; it ends with its block. Driven by `rollmesh train --status URL`.
"""

import os
import threading
from typing import Any, Self

import httpx
import msgspec
import psutil

from rollmesh.core.clock import Clock
from rollmesh.core.secret_file import admin_token
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.sampler import ANSWER_S, SAMPLE_S, ProcessSample, Telemetry


class Watch:
    """`with Watch(...):` follows the router while the block runs."""

    def __init__(self, url: str, role: str, folder: RunFolder, clock: Clock) -> None:
        """`url` is the router's HTTP address, '' for none; ConfigError for a token file that is no
        good."""
        self._url = url
        self._role = role
        self._folder = folder
        self._clock = clock
        self._process = psutil.Process(os.getpid())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        token = admin_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        with httpx.Client(headers=self._headers, timeout=ANSWER_S, trust_env=False) as client:
            while not self._ended.wait(SAMPLE_S):
                line = Telemetry(
                    time_s=round(self._clock.unix_s(), 3),
                    processes=[self._measure()],
                    router=self._ask(client),
                )
                self._folder.add_telemetry(msgspec.json.encode(line))

    def _measure(self) -> ProcessSample:
        with self._process.oneshot():
            times, rss_bytes = self._process.cpu_times(), self._process.memory_info().rss
        cpu_s = round(times.user + times.system, 2)
        return ProcessSample(self._role, self._process.pid, rss_bytes, cpu_s)

    def _ask(self, client: httpx.Client) -> dict[str, Any] | None:
        if not self._url:
            return None
        try:
            answer = client.get(f"{self._url}/status")
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError):
            return None
