"""What a journal holds, as the scheduler finds it."""

import pytest

from rollmesh.core.errors import JournalDamaged
from rollmesh.scheduler.service.actions import Drop, Happened, Put
from rollmesh.scheduler.service.records import Intent, IntentKind, Numbers, Revived, Ticket
from rollmesh.wire.scheduling import TicketState


def test_rows_are_kept_as_a_journal_keeps_them() -> None:
    kept = Revived()
    kept.keep([Put("tickets", "a", b"1"), Happened(1.0, 0, "", "", -1, "free")])
    kept.keep([Put("tickets", "a", b"2"), Put("nodes", "n", b"3"), Drop("tickets", "b")])
    assert kept.tables == {"tickets": {"a": b"2"}, "nodes": {"n": b"3"}}
    kept.keep([Drop("tickets", "a")])
    assert kept.tables["tickets"] == {}


def test_a_record_that_is_none_is_named() -> None:
    with pytest.raises(JournalDamaged, match="table tickets cannot be read"):
        Revived({"tickets": {"a": b"\xc1"}}).read("tickets", Ticket)
    assert Revived().read("numbers", Numbers) == []


def test_a_ticket_is_open_until_its_last_state() -> None:
    ticket = Ticket(key="k", pipeline_id="a", cluster="actor_train", asked_s=0.0)
    opened = set()
    for state in TicketState:
        ticket.state = state
        if ticket.is_open:
            opened.add(state)
    assert opened == {TicketState.QUEUED, TicketState.OFFERED, TicketState.GRANTED}


def test_an_intent_that_is_not_sent_is_never_late() -> None:
    intent = Intent(
        intent_id=1, kind=IntentKind.WAKE, pipeline_id="a", cluster="actor_infer", planned_s=0.0
    )
    assert intent.until_s == float("inf")
