"""The registry of sessions: rewards, outcomes and expiry."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import Outcome
from rollmesh.serve.interception.capture import CapturedSession, CaptureOptions, OpenedSession
from rollmesh.serve.interception.pieces import joined
from rollmesh.serve.interception.report import ReportWriter, RewardSlot, SessionReport
from rollmesh.serve.interception.sessions import RegisteredSession, SessionRegistry
from rollmesh.testing.clock import FakeClock

RETENTION_S = 100.0


class Session:
    """A captured session whose state the test sets."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.num_calls = 0
        self.is_busy = False
        self.held_bytes = 10
        self.fault = ""
        self.spent_because = ""
        self.forks: Counter[str] = Counter()
        self.healed: Counter[str] = Counter()
        self.sealed: list[str] = []
        self.is_forgotten = False

    @property
    def natural_outcome(self) -> Outcome:
        return Outcome.INFRA_ERROR if self.fault else Outcome.COMPLETED

    def held(self) -> dict[str, int]:
        return {"history": self.held_bytes}

    def node_of(self, name: int | str) -> int:
        nodes: dict[int | str, int] = {1: 1, 3: 3, "r3": 3}
        return nodes[name]

    def seal(self, reason: str) -> None:
        self.sealed.append(reason)

    def report(self) -> SessionReport:
        assert self.sealed
        assert not self.is_forgotten
        writer = ReportWriter()
        writer.rows(
            "samples", [(RewardSlot((1, 3), has_default=True), {}), (RewardSlot((1,), True), {})]
        )
        return writer.build(self.session_id, {f"{self.session_id}-r3": 3}, (1, 3))

    def forget(self) -> None:
        self.is_forgotten = True
        self.num_calls = 0
        self.forks = Counter()
        self.healed = Counter()


class SessionsUnderTest:
    """A registry of such sessions."""

    def __init__(self, max_bytes: int = 2**40) -> None:
        self.clock = FakeClock()
        self.sessions: list[Session] = []
        self.registry = SessionRegistry(self, self.clock, RETENTION_S, max_bytes)

    def open(self, wish: CaptureOptions) -> OpenedSession:
        self.sessions.append(Session(f"s{len(self.sessions)}"))
        return OpenedSession(self.sessions[-1], "sk-a", "p")

    def close(self, captured: CapturedSession) -> None:
        captured.seal("closed")

    def add(self) -> Session:
        self.registry.open(CaptureOptions(), b"{}")
        return self.sessions[-1]

    def finish(self, entry: RegisteredSession, outcome: Outcome | None) -> dict[str, Any]:
        report: dict[str, Any] = msgspec.json.decode(joined(self.registry.finish(entry, outcome)))
        return report

    def ids(self) -> list[str]:
        return [entry.captured.session_id for entry in self.registry.entries()]


def test_finish_seals_once_and_repeats_its_report() -> None:
    sessions = SessionsUnderTest()
    session = sessions.add()
    entry = sessions.registry.find("s0")
    sessions.registry.reward(entry, 1.0, None)
    sessions.registry.reward(entry, 0.5, "r3")
    first = sessions.finish(entry, None)
    assert first == {
        "session_id": "s0",
        "outcome": "completed",
        "spent_because": "",
        "samples": [{"reward": 0.5}, {"reward": 1.0}],
    }
    assert sessions.finish(entry, Outcome.AGENT_ERROR) == first
    assert session.sealed == ["it was finished"]
    assert session.is_forgotten


def test_a_late_reward_is_in_the_next_report() -> None:
    sessions = SessionsUnderTest()
    sessions.add()
    entry = sessions.registry.find("s0")
    assert sessions.finish(entry, None)["samples"] == [{"reward": None}] * 2
    sessions.registry.reward(entry, 0.0, None)
    assert sessions.finish(entry, None)["samples"] == [{"reward": 0.0}] * 2
    sessions.registry.reward(entry, 1.0, 1)
    assert sessions.finish(entry, None)["samples"] == [{"reward": 1.0}] * 2
    sessions.registry.reward(entry, 0.5, "chatcmpl-s0-r3")
    assert sessions.finish(entry, None)["samples"] == [{"reward": 0.5}, {"reward": 1.0}]
    for node in (2, "r3", "chatcmpl-s1-r3"):
        with pytest.raises(SessionError, match="neither a sampled node nor a response"):
            sessions.registry.reward(entry, 1.0, node)


@pytest.mark.parametrize(
    ("fault", "asked", "outcome"),
    [
        ("", None, Outcome.COMPLETED),
        ("no engine", None, Outcome.INFRA_ERROR),
        ("no engine", Outcome.TRUNCATED, Outcome.TRUNCATED),
    ],
)
def test_the_outcome_is_that_of_finish_or_otherwise_of_the_last_call(
    fault: str, asked: Outcome | None, outcome: Outcome
) -> None:
    sessions = SessionsUnderTest()
    sessions.add().fault = fault
    assert sessions.finish(sessions.registry.find("s0"), asked)["outcome"] == outcome


@pytest.mark.parametrize("asked", [None, Outcome.COMPLETED, Outcome.AGENT_ERROR])
def test_a_session_ended_by_a_limit_is_truncated_whatever_finish_names(
    asked: Outcome | None,
) -> None:
    sessions = SessionsUnderTest()
    sessions.add().spent_because = "it holds too much"
    report = sessions.finish(sessions.registry.find("s0"), asked)
    assert (report["outcome"], report["spent_because"]) == ("truncated", "it holds too much")


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    sessions = SessionsUnderTest()
    sessions.add()
    with pytest.raises(SessionError, match="no finite number"):
        sessions.registry.reward(sessions.registry.find("s0"), reward, None)


@pytest.mark.parametrize("reward", [1e308, -1.1e30])
def test_a_reward_that_is_too_large_to_train_on_is_refused(reward: float) -> None:
    sessions = SessionsUnderTest()
    sessions.add()
    with pytest.raises(SessionError, match="is larger than 1e\\+30") as caught:
        sessions.registry.reward(sessions.registry.find("s0"), reward, None)
    assert (caught.value.status, caught.value.code) == (400, "invalid_reward")
    sessions.registry.reward(sessions.registry.find("s0"), 1e30, None)


@pytest.mark.parametrize("node", [0, 2, "r4"])
def test_a_reward_for_an_unsampled_node_is_refused(node: int | str) -> None:
    sessions = SessionsUnderTest()
    sessions.add()
    entry = sessions.registry.find("s0")
    with pytest.raises(SessionError, match="neither a sampled node nor a response"):
        sessions.registry.reward(entry, 1.0, node)
    assert entry.node_rewards == {}


def test_unused_sessions_expire_after_the_retention_time() -> None:
    sessions = SessionsUnderTest()
    idle, asked, called, running = (sessions.add() for _ in range(4))
    sessions.clock.advance(RETENTION_S / 2)
    sessions.registry.find(asked.session_id)
    called.num_calls = 1
    running.is_busy = True
    sessions.clock.advance(RETENTION_S / 2)
    sessions.registry.expire()
    assert sorted(sessions.ids()) == ["s1", "s2", "s3"]
    assert idle.sealed == ["closed"]
    running.is_busy = False
    sessions.clock.advance(RETENTION_S)
    sessions.registry.expire()
    assert sessions.ids() == []
    assert sessions.registry.num_expired == 4
    with pytest.raises(SessionError, match="never opened, was deleted, or expired"):
        sessions.registry.find("s0")


def test_over_the_memory_limit_no_session_opens_until_another_is_deleted() -> None:
    sessions = SessionsUnderTest(max_bytes=100)
    sessions.registry.set_held_bytes(101)
    kept = sessions.add()
    sessions.registry.finish(sessions.registry.find(kept.session_id), None)
    with pytest.raises(SessionError, match="of 1 sessions 1 are finished: delete") as caught:
        sessions.add()
    assert (caught.value.status, caught.value.code) == (503, "over_budget")
    assert caught.value.retry_after_s
    sessions.registry.set_held_bytes(100)
    sessions.add()
    sessions.registry.set_held_bytes(101)
    for session_id in sessions.ids():
        sessions.registry.delete(sessions.registry.find(session_id))
    sessions.add()


def test_fork_counts_survive_their_sessions() -> None:
    sessions = SessionsUnderTest()
    for cause in ("restart", "restart", "template"):
        sessions.add().forks[cause] += 1
    sessions.sessions[0].healed["white_space"] += 2
    sessions.registry.finish(sessions.registry.find("s0"), None)
    sessions.registry.delete(sessions.registry.find("s0"))
    assert sessions.registry.forks() == {"restart": 2, "template": 1}
    assert sessions.registry.healed() == {"white_space": 2}
    assert sessions.registry.forks() == {"restart": 2, "template": 1}
