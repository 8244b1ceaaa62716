"""A PNG of our own: what other programs read of it."""

import struct
import zlib

from rollmesh.scheduler.simulator.pixels import Pixels, text_width

RED = (255, 0, 0)
INK = (10, 10, 10)


def decode(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and rows, by the format's letter; every check sum is looked at."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    parts: dict[bytes, bytes] = {}
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        (crc,) = struct.unpack_from(">I", png, at + 8 + length)
        assert crc == zlib.crc32(name + data)
        parts[name] = data
        at += 12 + length
    assert list(parts) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert form == [8, 2, 0, 0, 0]
    raw, line = zlib.decompress(parts[b"IDAT"]), 1 + 3 * width
    assert len(raw) == height * line
    assert {raw[number * line] for number in range(height)} == {0}
    return width, height, [raw[n * line + 1 : (n + 1) * line] for n in range(height)]


def _pixel(rows: list[bytes], x: int, y: int) -> tuple[int, ...]:
    return tuple(rows[y][3 * x : 3 * x + 3])


def test_a_box_is_where_it_was_put_and_cut_at_the_edge() -> None:
    pixels = Pixels(10, 6)
    pixels.box(7, 4, 99, 99, RED)
    pixels.box(-5, -5, 1, 1, INK)
    width, height, rows = decode(pixels.png())
    assert (width, height) == (10, 6)
    assert _pixel(rows, 7, 4) == _pixel(rows, 9, 5) == RED
    assert _pixel(rows, 6, 4) == _pixel(rows, 7, 3) == (255, 255, 255)
    assert _pixel(rows, 0, 0) == INK


def test_a_box_of_no_width_is_seen_all_the_same() -> None:
    pixels = Pixels(4, 1)
    pixels.box(2.0, 0, 2.0, 1, RED)
    assert _pixel(decode(pixels.png())[2], 2, 0) == RED


def test_letters_are_drawn_and_unknown_ones_are_question_marks() -> None:
    def drawn(words: str, size: int = 1) -> list[bytes]:
        pixels = Pixels(60, 20)
        pixels.text(1, 1, words, INK, size)
        return decode(pixels.png())[2]

    rows = drawn("L")
    assert all(_pixel(rows, 1, y) == INK for y in range(1, 8))
    assert all(_pixel(rows, x, 7) == INK for x in range(1, 6))
    assert _pixel(rows, 3, 3) == (255, 255, 255)
    assert drawn("\u00e9") == drawn("?") != drawn("e")
    assert _pixel(drawn("L", size=2), 10, 14) == INK
    assert text_width("ab", 2) == 24
