"""Settings of the engines: the servers that sample tokens."""

import os
import sys
from typing import Literal

from rollmesh.core.addresses import why_no_engine_url, why_no_host_entry
from rollmesh.core.config_section import (
    NonNegative,
    NonNegativeSeconds,
    Positive,
    PositiveSeconds,
    Section,
)

EngineLaunch = Literal["embedded", "sglang"]


class EngineConfig(Section, frozen=True):
    """The servers that sample tokens."""

    urls: tuple[str, ...] = ()
    """SGLang servers, such as ["http://host:30000"]; empty starts the embedded engine."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts, IP addresses or networks (CIDR) from which engines may join while the mesh runs
    (default: none; only engines of the configuration are used)."""
    backend: str = "sglang"
    """Protocol of the engines at `urls`: `sglang`, or `module:attribute` of a factory of your own
    (default: sglang, which the embedded engine serves too)."""
    num_embedded: Positive = 1
    """How many embedded engines to start where no urls are given."""
    launch: EngineLaunch = "embedded"
    """Engines that a run starts where no urls are given: `embedded` (default), or `sglang`, servers
    of SGLang (docs/howto/sglang-fleet.md)."""
    num_servers: Positive = 1
    """`sglang`: how many servers to start (default: 1)."""
    gpus_each: NonNegative = 1
    """`sglang`: GPUs of each server, over which it shards the model (`--tp-size`); 0 is a server
    without a GPU, which needs `--device cpu` in `args` (default: 1)."""
    args: tuple[str, ...] = ()
    """`sglang`: more options of `python -m sglang.launch_server`, such as ["--mem-fraction-static",
    "0.8"]; they win over the defaults, and addresses, model and key are not among them."""
    python: str = ""
    """`sglang`: the Python that has SGLang installed, which pins a torch of its own: the
    `bin/python` of a virtual environment (default: empty, the Python that runs rollmesh)."""
    load_timeout_s: PositiveSeconds = 1800.0
    """`sglang`: seconds in which a server must load its model and be ready (default: 1800)."""
    exit_timeout_s: NonNegativeSeconds = 5.0
    """`sglang`: seconds that a stopped server has to end by itself before it is killed
    (default: 5)."""
    max_running: Positive = 256
    """Embedded engine: requests that generate at the same time."""
    kv_tokens: Positive = 65536
    """Embedded engine: size of the key-value memory, in tokens."""
    num_threads: Positive = 1
    """Embedded engine: torch threads."""
    answer_timeout_s: PositiveSeconds = 90.0
    """Seconds after which a request without an answer is abandoned and resumed at another engine.
    Longer than another program's trainer pauses an engine (default: 90)."""
    abort_timeout_s: PositiveSeconds = 5.0
    """Seconds in which an engine must end a request that it is asked to abort; later, the request
    is dropped with the tokens that were not received yet (default: 5)."""
    avoid_s: NonNegativeSeconds = 1.0
    """Seconds for which an engine that failed a request is chosen only if there is no other
    (default: 1)."""
    connect_timeout_s: PositiveSeconds = 5.0
    """Seconds in which a connection to an engine, or to an endpoint of a relay, must open
    (default: 5)."""
    control_timeout_s: PositiveSeconds = 30.0
    """Seconds in which an engine must pause, continue, flush its cache, load an adapter or score
    the probe; loading weights has publish.lease_s (default: 30)."""
    probe_timeout_s: PositiveSeconds = 2.0
    """Seconds in which an engine must answer a check of its health and weights (default: 2)."""
    max_inflight: NonNegative = 0
    """Requests that a worker or gateway has at one engine at a time; the others wait there, and
    sessions take turns for each free place (default: 0, an eighth more than the engine reports to
    run at a time, or no limit if it reports nothing)."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if why := why_no_engine_url(url):
                raise ValueError(f"urls: {url}: {why}")
        for entry in self.allow_hosts:
            if why := why_no_host_entry(entry):
                raise ValueError(f"allow_hosts: {why}")
        if self.launch == "sglang" and self.urls:
            raise ValueError(
                'launch = "sglang" starts servers, and urls names running ones; remove one of them'
            )
        for word in self.args:
            if why := why_no_sglang_option(word):
                raise ValueError(f"args: {why}")

    @property
    def server_python(self) -> str:
        """The path of the Python that starts SGLang servers."""
        return os.path.expanduser(self.python) or sys.executable

    @property
    def num_launched(self) -> int:
        """How many engines a run starts."""
        if self.urls:
            return 0
        return self.num_servers if self.launch == "sglang" else self.num_embedded


_ASSIGNED = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--host": "launch",
    "--port": "launch",
    "--weight-version": "launch",
    "--api-key": "ROLLMESH_ENGINE_KEY_FILE",
    "--admin-api-key": "ROLLMESH_ENGINE_KEY_FILE",
    "--config": "engine.args itself",
    "--base-gpu-id": "engine.gpus_each",
    "--gpu-id-step": "engine.gpus_each",
    "--nnodes": "engine.gpus_each, on one machine",
    "--node-rank": "engine.gpus_each, on one machine",
    "--dist-init-addr": "engine.gpus_each, on one machine",
}
"""Options of SGLang that a user cannot set in engine.args, and what sets them."""


def why_no_sglang_option(word: str) -> str:
    """Return why `word` cannot be one of engine.args; '' if it can."""
    option = word.partition("=")[0]
    owner = _ASSIGNED.get(option)
    return f"{option} is set by {owner}; remove it" if owner else ""
