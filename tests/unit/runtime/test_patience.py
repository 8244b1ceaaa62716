"""What a generation puts up with, and what it says when it does no more."""

from rollmesh.core.errors import EngineError, EngineOverloaded
from rollmesh.runtime.patience import MAX_SAID_CHARS, GenerationSettings, Patience

A, B = ("http://a", "i1"), ("http://b", "i1")
SICK_S = GenerationSettings().sick_s
OOPS = "http://a: HTTP 500: oops"


def patience() -> Patience:
    return Patience(GenerationSettings())


def fault(of: Patience, life: tuple[str, str], now_s: float) -> EngineError | None:
    return of.on_fault(life, OOPS, now_s) or of.on_cut(False, now_s)


def test_a_lone_engine_that_stays_sick_is_given_up_in_its_own_words() -> None:
    mine = patience()
    assert [fault(mine, A, now_s) for now_s in (5.0, 5.0, 5.0 + SICK_S - 0.1)] == [None] * 3
    error = fault(mine, A, 5.0 + SICK_S)
    assert f"no other is there (last: {OOPS})" in str(error)
    assert "/healthz" in str(error)


def test_an_engine_that_is_new_or_was_restarted_gets_a_try() -> None:
    mine = patience()
    assert [fault(mine, A, now_s) for now_s in (0.0, 1.0)] == [None, None]
    assert fault(mine, B, 10.0) is None
    assert fault(mine, ("http://a", "i2"), 20.0) is None
    assert fault(mine, B, 20.0) is not None


def test_a_token_makes_faults_good_again() -> None:
    mine = patience()
    fault(mine, A, 0.0)
    mine.on_cut(True, 10.0)
    assert fault(mine, A, 10.0) is None
    assert fault(mine, A, 10.0 + SICK_S) is not None


def test_cuts_that_are_nobodys_fault_may_go_on_for_long() -> None:
    mine = patience()
    told = [mine.on_cut(False, 10.0 * n) for n in range(17)]
    assert told[:16] == [None] * 16
    assert "no engine got on with it" in str(told[16])


def test_full_queues_are_overload_unless_tokens_or_faults_come_between() -> None:
    mine = patience()
    assert [mine.on_full_queue("full") for _ in range(8)] == [None] * 8
    mine.on_tokens()
    assert [mine.on_full_queue("full") for _ in range(8)] == [None] * 8
    fault(mine, A, 0.0)
    assert [mine.on_full_queue("full") for _ in range(8)] == [None] * 8
    assert isinstance(mine.on_full_queue("full"), EngineOverloaded)


def test_what_keeps_engines_away_is_said_within_bounds() -> None:
    mine = patience()
    assert "no engine is ready; `rollmesh status`" in str(mine.without_engine())
    fault(mine, A, 0.0)
    assert f"no engine is ready (last: {OOPS})" in str(mine.without_engine())
    mine.on_missing("http://a: joining, connection refused" + "x" * 1000)
    told = str(mine.without_engine())
    assert "(last: http://a: joining, connection refused" in told
    assert len(told) < MAX_SAID_CHARS + 150
    mine.on_missing("")
    assert "connection refused" in str(mine.without_engine())
