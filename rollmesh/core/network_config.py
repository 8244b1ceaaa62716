"""Settings of this machine's address and connections, and of the endpoint of agents."""

from rollmesh.core.addresses import why_no_public_url, why_not_advertised
from rollmesh.core.config_section import NonNegativeSeconds, Positive, PositiveSeconds, Section

LEAST_SILENCE_S, MOST_SILENCE_S = 3.0, 3600.0
"""Keepalive has whole seconds, and a busy link may lose two packets in a row."""


class NetworkConfig(Section, frozen=True):
    """The address of this machine for the others, and its connections to them."""

    advertise: str = ""
    """Host name or IP address of this machine that processes on other machines are given for its
    listeners, unless these listen on loopback (default: the address at which each listens; on
    0.0.0.0, this machine's address on the route to the peer)."""
    silence_timeout_s: PositiveSeconds = 10.0
    """Seconds after which a connection for messages or requests whose other machine does not
    acknowledge anything is closed and opened again, 3 to 3600; more on links with longer
    interruptions, such as migrations of virtual machines. Heartbeats do not depend on it: the
    other machine's kernel acknowledges for a process that is busy or stopped (default: 10)."""

    def __post_init__(self) -> None:
        timeout_s = self.silence_timeout_s
        if not LEAST_SILENCE_S <= timeout_s <= MOST_SILENCE_S:
            raise ValueError(
                f"silence_timeout_s = {timeout_s:g}: use {LEAST_SILENCE_S:g} to {MOST_SILENCE_S:g}"
            )
        if self.advertise and (why := why_not_advertised(self.advertise)):
            raise ValueError(f"advertise: {why}")


class InterceptionConfig(Section, frozen=True):
    """The HTTP endpoint of agents."""

    bind: str = "127.0.0.1:0"
    """host:port inside each worker; port 0 picks a free one."""
    public_url: str = ""
    """Address that agents are given, such as "http://{host}:{port}", where {host} and {port} are
    those of the worker or gateway; for agents on other machines, in containers and sandboxes, or
    behind an ingress. A path may follow (default: `bind`, with network.advertise)."""
    max_body_bytes: Positive = 64 * 2**20
    """Longer request bodies are refused with 413."""
    max_inflight_bytes: Positive = 256 * 2**20
    """Request bodies in memory, counted as their bytes come; past it, or past a quarter of it for
    one session, the next are read once others have been answered (default: 256 MiB)."""
    max_session_bytes: Positive = 2**30
    """A session that holds more ends its rollout as `truncated`."""
    max_turns_at_once: Positive = 64
    """Turns of one session that are sampled at a time, each choice of a call counted, and those
    kept for a retry; past it a call gets 429, and 400 if it alone asks for more (default: 64)."""
    max_blob_bytes: Positive = 512 * 2**20
    """Images and long texts in memory; past it the longest unused go to a file."""
    spill_folder: str = ""
    """Folder of that file; empty: the system's folder for temporary files (default: empty)."""
    image_hosts: tuple[str, ...] = ()
    """Hosts (`host` or `host:port`) from which engines may fetch images that agents name by http(s)
    addresses; elsewhere, and where the list is empty, only `data:` is taken (default: empty)."""
    retry_window_s: PositiveSeconds = 30.0
    """Seconds for which a generation that lost its reader is kept for a retry (default: 30)."""
    keepalive_s: PositiveSeconds = 15.0
    """An idle stream gets a comment this often."""
    engine_wait_s: PositiveSeconds = 120.0
    """Seconds, paused time not counted, that a call waits for an engine that is READY, then it gets
    503 (default: 120)."""
    rotating_lines: tuple[str, ...] = (
        "x-anthropic-billing-header:",
        "(?:Today'?s|The current|Current) date",
        "<current_date>",
    )
    """Lines of a system text that begin with one of these patterns may differ in every call."""
    drain_timeout_s: NonNegativeSeconds = 30.0
    """Stand-alone gateway: seconds that a stopped one waits for calls in progress (default: 30)."""
    upstream_cool_down_s: NonNegativeSeconds = 2.0
    """Relay: seconds for which an endpoint that failed is avoided, where there are others
    (default: 2)."""
    retention_s: PositiveSeconds = 21_600.0
    """Stand-alone gateway: seconds for which an unused session is kept (default: 21600)."""

    def __post_init__(self) -> None:
        if self.public_url and (why := why_no_public_url(self.public_url)):
            raise ValueError(f"public_url: {why}")
