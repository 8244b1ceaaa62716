"""A client of `rollmesh gateway`: open sessions, reward them and take their samples.

    with Gateway("http://127.0.0.1:8100", Path("admin.token")) as gateway:
        session = gateway.open(metadata={"task": 7})
        run_my_agent(session.base_url, session.api_key)
        session.reward(1.0)
        samples = session.finish()["samples"]
        session.delete()

- Every call may be repeated: `finish` returns the same samples until `delete`.
- A refused or failed call raises AddressError, one line with the address and the reason.
- One object serves all threads.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from rollmesh.core.errors import AddressError
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE, admin_token, read_secret
from rollmesh.core.types import Json, Outcome

ANSWER_S = 60.0
SESSIONS = "/admin/sessions"


class GatewaySession:
    """One session of a gateway: the two secrets for its agent, and the owner's calls."""

    def __init__(self, gateway: "Gateway", opened: Mapping[str, str]) -> None:
        self._gateway = gateway
        self.session_id = opened["session_id"]
        self.api_key = opened["api_key"]
        """Secret that the agent sends as a Bearer token or as x-api-key."""
        self.base_url = opened["base_url"]
        """Base URL for OpenAI clients, ends in `/v1`; needs the key."""
        self.path_url = opened["path_url"]
        """Base URL for agents that cannot send a key: the URL itself is secret."""

    def reward(self, reward: float, node: int | str | None = None) -> None:
        """Set the session's reward, or that of one turn: a node's number or a response's id."""
        at = {} if node is None else {"node": node}
        self._gateway.request("POST", f"{self._path}/reward", {"reward": reward, **at})

    def finish(self, outcome: Outcome | None = None) -> dict[str, Json]:
        """Seal the session; return its outcome, samples and messages (docs/howto/gateway.md)."""
        body = {} if outcome is None else {"outcome": outcome}
        return self._gateway.request("POST", f"{self._path}/finish", body)

    def delete(self) -> None:
        """Delete the session and its samples."""
        self._gateway.request("DELETE", self._path)

    @property
    def _path(self) -> str:
        return f"{SESSIONS}/{self.session_id}"


class Gateway:
    """The admin API of one gateway; `with` closes its connections."""

    def __init__(self, url: str, admin_token_file: str | Path | None = None) -> None:
        """Connect to `url`, which `rollmesh gateway` prints; the token is that of its
        --admin-token-file, or of ROLLMESH_ADMIN_TOKEN.
        """
        token = read_secret(Path(admin_token_file)) if admin_token_file else admin_token()
        if not token:
            raise AddressError(
                f"{url}: no admin token; name its file, or set {ADMIN_TOKEN_VARIABLE}"
            )
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(headers=headers, timeout=ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions stay with the gateway."""
        self._client.close()

    def open(
        self,
        *,
        metadata: Mapping[str, Json] | None = None,
        sampling: str | Mapping[str, Json] | None = None,
        seed: int | None = None,
    ) -> GatewaySession:
        """Open a session for one rollout.

        `sampling` is `train` (the default), `eval` or rules by field; siblings of a group need
        different seeds, and a seed that is left out is random. A relay takes neither.
        """
        asked = {"metadata": dict(metadata or {}), "sampling": sampling, "seed": seed}
        body = {name: value for name, value in asked.items() if value is not None}
        return GatewaySession(self, self.request("POST", SESSIONS, body))

    def sessions(self) -> list[dict[str, Json]]:
        """Return the state of each session that is not deleted."""
        found: list[dict[str, Json]] = self.request("GET", SESSIONS)["sessions"]
        return found

    def request(self, method: str, path: str, body: Json = None) -> dict[str, Any]:
        """Send one request of the admin API; AddressError if it fails."""
        raw = None if body is None else msgspec.json.encode(body)
        try:
            reply = self._client.request(method, self.url + path, content=raw)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise AddressError(f"{self.url}: no answer ({why}); is the gateway running?") from None
        answer: dict[str, Any] | None = None
        with contextlib.suppress(msgspec.MsgspecError):
            answer = msgspec.json.decode(reply.content, type=dict[str, Any])
        if reply.is_success and answer is not None:
            return answer
        fault = (answer or {}).get("error")
        message = fault.get("message") if isinstance(fault, dict) else fault
        why = message or "not a rollmesh gateway?"
        raise AddressError(f"{self.url}{path}: HTTP {reply.status_code}: {why}")
