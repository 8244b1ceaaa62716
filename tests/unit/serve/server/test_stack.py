"""Whereabouts: the function that a thread is in, and whose code called it."""

import sys
import threading

from rollmesh.serve.server.stack import describe, whereabouts


def test_function_is_named_with_its_place() -> None:
    assert describe(sys._getframe()).startswith(  # noqa: SLF001 - the only way to a frame
        "test_function_is_named_with_its_place (test_stack.py:"
    )


def test_librarys_function_is_named_with_who_called_it() -> None:
    entered, gate = threading.Event(), threading.Event()

    def wait_for_the_gate() -> None:
        entered.set()
        gate.wait()

    thread = threading.Thread(target=wait_for_the_gate)
    thread.start()
    entered.wait()
    assert thread.ident is not None
    found = ""
    while "threading.py" not in found:
        found = whereabouts(thread.ident)
    gate.set()
    thread.join()
    assert found.split(" (")[0] in ("Event.wait", "Condition.wait")
    assert "wait_for_the_gate (test_stack.py:" in found.partition(" for ")[2]


def test_thread_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert whereabouts(thread.ident) == ""
