"""`rollmesh coordinator`: mistakes in one line, and the order of the engines."""

import pytest

from rollmesh.cli import main as cli

ADDRESSES = ("--scheduler", "tcp://127.0.0.1:1", "--router", "tcp://127.0.0.1:2")
REST = ("--pipeline", "p", "--weights", "weights")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*ADDRESSES, *REST), "--engine URL: name the engine of each generation worker"),
        ((*ADDRESSES, *REST, "--engine", "nowhere"), "--engine nowhere"),
        (
            (*ADDRESSES, *REST, "--engine", "http://e:1", "--engine", "http://e:1"),
            "an engine is listed twice",
        ),
        (
            ("--scheduler", "here", *ADDRESSES[2:], *REST, "--engine", "http://e:1"),
            "here: ",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["coordinator", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
