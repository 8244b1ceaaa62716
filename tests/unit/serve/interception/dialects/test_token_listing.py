"""Tokens and log-probs in the shape of OpenAI's APIs."""

import msgspec

from rollmesh.serve.interception.dialects.token_listing import TokenListing

PIECES = {1: b"a", 2: "\u00e9".encode()[:1], 3: b'"'}


def rows(*args: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = msgspec.json.decode(TokenListing().rows(*args))  # type: ignore[arg-type] # spelled out by the tests
    return found


def test_a_part_of_a_character_has_its_true_bytes() -> None:
    (row,) = rows(PIECES.__getitem__, [2], [-0.25], ())
    assert row == {"token": "\ufffd", "logprob": -0.25, "bytes": [0xC3], "top_logprobs": []}


def test_alternatives_are_listed_token_by_token() -> None:
    tops = [[(-0.5, 1), (-1.5, 3)], []]
    first, second = rows(PIECES.__getitem__, [1, 3], [-0.5, -2.0], tops)
    assert first["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": '"', "logprob": -1.5, "bytes": [34]},
    ]
    assert (second["token"], second["top_logprobs"]) == ('"', [])


def test_no_tokens_are_an_empty_list() -> None:
    assert rows(PIECES.__getitem__, [], [], ()) == []
