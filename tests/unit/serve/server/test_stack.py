"""Locations: the code that a thread runs, its caller in user code, and the source of an error."""

import sys
import threading

from rollmesh.serve.server.stack import describe, place_of, whereabouts


def test_a_function_is_named_with_its_file_and_line() -> None:
    assert describe(sys._getframe()).startswith(  # noqa: SLF001 - the only way to a frame
        "test_a_function_is_named_with_its_file_and_line (test_stack.py:"
    )


def test_a_library_function_is_named_with_its_caller() -> None:
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


def test_an_ended_thread_has_no_location() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert whereabouts(thread.ident) == ""


def test_an_error_without_a_user_frame_is_located_at_the_method() -> None:
    class Env:
        def score(self) -> None:
            """Called by a library only."""

    place = place_of(ValueError("raised elsewhere"), Env().score)
    line = Env.score.__code__.co_firstlineno
    assert place is not None
    assert (place.file, place.line, place.function) == (__file__, line, "score")
    assert str(place) == f"test_stack.py:{line} in score"


def test_a_method_that_is_no_python_function_has_no_location() -> None:
    assert place_of(ValueError("no"), len) is None
