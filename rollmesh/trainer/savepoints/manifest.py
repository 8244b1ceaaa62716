"""What a savepoint consists of, and the proof that it is whole: size and checksums of every file.

    savepoint/   manifest.json        {"crc32": of the JSON behind "manifest", "manifest": {...}}
                 pieces-0.json ...    only while it is written: what rank 0, ... has written, here
                                      or in a folder of several roles

A file is written in pieces, by one rank or several, each with a CRC-32 (zlib's, RFC 1952).
Invariant: the pieces of a file cover it from its first byte to its last, each byte once; what is
sealed holds no other files, and what others put there later is none of it; the manifest is the
last file to be written, when all others are on the disk. No torch; driven by imprint.py (which
writes), and shelf.py (which seals and proves).
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from rollmesh.core.errors import SavepointError

Buffer = bytes | memoryview

MANIFEST = "manifest.json"
FORMAT = 1
BLOCK_BYTES = 4 * 2**20
"""Checksummed and written, or read, at a time: it is in the processor's cache for both."""
_PIECES = "pieces-*.json"


class Piece(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Bytes of a file that one rank has written."""

    offset: int
    num_bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a savepoint but its own, by their paths in the folder."""

    files: dict[str, tuple[Piece, ...]]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for pieces in self.files.values() for piece in pieces)


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc32: int
    manifest: msgspec.Raw


def write_pieces(path: Path, parts: Iterable[tuple[int, Buffer]]) -> tuple[Piece, ...]:
    """Write each part at its offset, whoever writes the rest; on the disk when this returns.
    SavepointError where that refuses."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            pieces = tuple([_write(file, offset, memoryview(data)) for offset, data in parts])
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise SavepointError(f"{path}: {error.strerror}") from None
    return pieces


def write_file(path: Path, data: bytes) -> tuple[Piece, ...]:
    """One that is written by one alone."""
    return write_pieces(path, [(0, data)])


def tell(folder: Path, who: str, files: Mapping[str, tuple[Piece, ...]]) -> None:
    """Leave word of what `who`, a rank or the loop, has written, all of it on the disk."""
    write_file(folder / f"pieces-{who}.json", msgspec.json.encode(dict(files)))


def seal(folder: Path) -> Manifest:
    """Make one manifest of what was told, and have the folder on the disk.

    SavepointError where it does not cover what is there; OSError.
    """
    files: dict[str, list[Piece]] = {}
    for path in sorted(folder.rglob(_PIECES)):
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[Piece, ...]])
        place = path.parent.relative_to(folder)
        for name, pieces in told.items():
            files.setdefault(str(place / name), []).extend(pieces)
        path.unlink()
    manifest = Manifest({name: tuple(sorted(files[name])) for name in sorted(files)})
    if strange := _check_cover(folder, manifest):
        raise SavepointError(f"{folder / min(strange)}: does not belong into a savepoint")
    text = msgspec.json.encode(manifest)
    write_file(folder / MANIFEST, msgspec.json.encode(_Sealed(zlib.crc32(text), msgspec.Raw(text))))
    for place in {(folder / name).parent for name in files} | {folder}:
        sync_folder(place)
    return manifest


def prove(folder: Path) -> Manifest:
    """Read every byte of the savepoint; SavepointError, in one line, where it is not whole."""
    try:
        manifest = _unsealed(folder / MANIFEST)
        _check_cover(folder, manifest)
        for name, pieces in manifest.files.items():
            _check(folder / name, pieces)
    except OSError as error:
        raise SavepointError(f"{error.filename or folder}: {error.strerror}") from None
    return manifest


def sync_folder(folder: Path) -> None:
    """Have the names in it on the disk. OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write(file: int, offset: int, data: memoryview) -> Piece:
    crc32, start = 0, offset
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        crc32 = zlib.crc32(block, crc32)
        while block:
            num_bytes = os.pwrite(file, block, offset)
            offset += num_bytes
            block = block[num_bytes:]
    return Piece(start, len(data), crc32)


def _unsealed(path: Path) -> Manifest:
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except FileNotFoundError:
        raise SavepointError(f"{path.parent}: was cut off before it was whole") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SavepointError(f"{path}: is no manifest: {error}") from None
    if zlib.crc32(sealed.manifest) != sealed.crc32:
        raise SavepointError(f"{path}: has a wrong checksum")
    if manifest.format != FORMAT:
        raise SavepointError(
            f"{path}: is of format {manifest.format}; this rollmesh reads {FORMAT}"
        )
    return manifest


def _check_cover(folder: Path, manifest: Manifest) -> set[str]:
    """Whether the manifest's files are there, and their pieces tile them; what else is there."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if absent := manifest.files.keys() - found:
        raise SavepointError(f"{folder / min(absent)}: is not there")
    for name, pieces in manifest.files.items():
        end = 0
        for piece in pieces:
            if piece.offset != end:
                raise SavepointError(f"{folder / name}: nobody wrote its bytes from {end} on")
            end += piece.num_bytes
        size_bytes = (folder / name).stat().st_size
        if size_bytes != end:
            raise SavepointError(f"{folder / name}: has {size_bytes} bytes and should have {end}")
    return found - manifest.files.keys() - {MANIFEST}


def _check(path: Path, pieces: Iterable[Piece]) -> None:
    with path.open("rb", buffering=0) as file:
        for piece in pieces:
            crc32 = 0
            for block in _blocks(file.fileno(), piece):
                crc32 = zlib.crc32(block, crc32)
            if crc32 != piece.crc32:
                where = f"at {piece.offset}, {piece.num_bytes} bytes"
                raise SavepointError(f"{path}: has a wrong checksum ({where})")


def _blocks(file: int, piece: Piece) -> Iterator[bytes]:
    stop = piece.offset + piece.num_bytes
    for at in range(piece.offset, stop, BLOCK_BYTES):
        yield os.pread(file, min(BLOCK_BYTES, stop - at), at)
