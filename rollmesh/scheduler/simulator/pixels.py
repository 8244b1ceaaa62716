"""A picture of pixels, written as PNG.

Owns the raster, a font of 5 by 7 points, and the file's format (PNG, W3C 2003: signature, IHDR,
IDAT by zlib, IEND). Invariant: what lies outside is not drawn. Here since matplotlib is the
trainer's and a chart of boxes needs none. Driven by picture.py.
"""

import struct
import zlib

from rollmesh.scheduler.simulator.chart import Colour
from rollmesh.scheduler.simulator.glyphs import GLYPHS, HEIGHT, WIDTH

WHITE: Colour = (255, 255, 255)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Pixels:
    """See the module."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [bytearray(WHITE * width) for _ in range(height)]

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """Filled, at least a pixel wide."""
        first = max(0, round(left))
        last = min(self.width, max(first + 1, round(right)))
        if last <= first:
            return
        line = bytes(colour) * (last - first)
        for row in self._rows[max(0, round(top)) : max(0, round(bottom))]:
            row[3 * first : 3 * last] = line

    def text(self, left: int, top: int, words: str, colour: Colour, size: int = 1) -> None:
        """From its upper left corner; letters that the font lacks are question marks."""
        for number, letter in enumerate(words):
            x = left + number * (WIDTH + 1) * size
            for column, bits in enumerate(GLYPHS.get(letter, GLYPHS["?"])):
                for line in range(HEIGHT):
                    if bits >> line & 1:
                        right, down = x + column * size, top + line * size
                        self.box(right, down, right + size, down + size, colour)

    def png(self) -> bytes:
        """The file."""
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        data = zlib.compress(b"".join(b"\0" + bytes(row) for row in self._rows), 9)
        return SIGNATURE + _part(b"IHDR", head) + _part(b"IDAT", data) + _part(b"IEND", b"")


def text_width(words: str, size: int = 1) -> int:
    """In pixels."""
    return len(words) * (WIDTH + 1) * size


def _part(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
