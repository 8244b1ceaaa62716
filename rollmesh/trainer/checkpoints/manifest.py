"""The manifest of a checkpoint: size and checksums of every file, which prove that it is complete.

    checkpoint/  manifest.json        {"crc32": of the JSON behind "manifest", "manifest": {...}}
                 pieces-0.json ...    only while it is written: what rank 0, ... has written, here
                                      or in a folder of several roles

- A file is written in pieces by one or several ranks, each with a CRC-32 (zlib's, RFC 1952). The
  pieces cover every byte of the file exactly once.
- A sealed checkpoint holds no other files; files that are added later are ignored.
- The manifest is written last, when all other files are on the disk.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from rollmesh.core.errors import CheckpointError

Buffer = bytes | memoryview

MANIFEST = "manifest.json"
FORMAT = 1
BLOCK_BYTES = 4 * 2**20
"""Unit of reading, writing and checksumming; it fits the processor's cache."""
_PIECES = "pieces-*.json"


class FilePiece(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A byte range of a file, written by one rank."""

    offset: int
    num_bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a checkpoint except the manifest, by their paths in the folder."""

    files: dict[str, tuple[FilePiece, ...]]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for pieces in self.files.values() for piece in pieces)


class _SealedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc32: int
    manifest: msgspec.Raw


def write_pieces(path: Path, parts: Iterable[tuple[int, Buffer]]) -> tuple[FilePiece, ...]:
    """Write each part at its offset and sync the file; other ranks may write other parts.
    CheckpointError if the disk refuses."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            pieces = tuple([_write(file, offset, memoryview(data)) for offset, data in parts])
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return pieces


def write_file(path: Path, data: bytes) -> tuple[FilePiece, ...]:
    """Write a file that has only one writer."""
    return write_pieces(path, [(0, data)])


def record_pieces(folder: Path, writer: str, files: Mapping[str, tuple[FilePiece, ...]]) -> None:
    """Record the pieces that `writer` (a rank, or the loop) has written; all of them are on the
    disk."""
    write_file(folder / f"pieces-{writer}.json", msgspec.json.encode(dict(files)))


def seal(folder: Path) -> Manifest:
    """Write the manifest from the recorded pieces, and sync the folder.

    Raises CheckpointError if the pieces do not match the files, or OSError.
    """
    files: dict[str, list[FilePiece]] = {}
    for path in sorted(folder.rglob(_PIECES)):
        written = msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[FilePiece, ...]])
        place = path.parent.relative_to(folder)
        for name, pieces in written.items():
            files.setdefault(str(place / name), []).extend(pieces)
        path.unlink()
    manifest = Manifest({name: tuple(sorted(files[name])) for name in sorted(files)})
    if unknown := _check_cover(folder, manifest):
        raise CheckpointError(f"{folder / min(unknown)}: not part of the checkpoint")
    text = msgspec.json.encode(manifest)
    write_file(
        folder / MANIFEST, msgspec.json.encode(_SealedManifest(zlib.crc32(text), msgspec.Raw(text)))
    )
    for place in {(folder / name).parent for name in files} | {folder}:
        sync_folder(place)
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every byte of the checkpoint; CheckpointError, in one line, if it is not complete."""
    try:
        manifest = _read_manifest(folder / MANIFEST)
        _check_cover(folder, manifest)
        for name, pieces in manifest.files.items():
            _verify_file(folder / name, pieces)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from None
    return manifest


def sync_folder(folder: Path) -> None:
    """Sync the folder's entries to the disk; raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write(file: int, offset: int, data: memoryview) -> FilePiece:
    crc32, start = 0, offset
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        crc32 = zlib.crc32(block, crc32)
        while block:
            num_bytes = os.pwrite(file, block, offset)
            offset += num_bytes
            block = block[num_bytes:]
    return FilePiece(start, len(data), crc32)


def _read_manifest(path: Path) -> Manifest:
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_SealedManifest)
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: incomplete: it has no manifest") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a manifest: {error}") from None
    if zlib.crc32(sealed.manifest) != sealed.crc32:
        raise CheckpointError(f"{path}: wrong checksum")
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.format}; this version of rollmesh reads {FORMAT}"
        )
    return manifest


def _check_cover(folder: Path, manifest: Manifest) -> set[str]:
    """Check that the manifest's files exist and their pieces cover them; return the names of other
    files."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if absent := manifest.files.keys() - found:
        raise CheckpointError(f"{folder / min(absent)}: missing")
    for name, pieces in manifest.files.items():
        end = 0
        for piece in pieces:
            if piece.offset != end:
                raise CheckpointError(f"{folder / name}: bytes from {end} on were not written")
            end += piece.num_bytes
        size_bytes = (folder / name).stat().st_size
        if size_bytes != end:
            raise CheckpointError(f"{folder / name}: {size_bytes} bytes instead of {end}")
    return found - manifest.files.keys() - {MANIFEST}


def _verify_file(path: Path, pieces: Iterable[FilePiece]) -> None:
    with path.open("rb", buffering=0) as file:
        for piece in pieces:
            crc32 = 0
            for block in _blocks(file.fileno(), piece):
                crc32 = zlib.crc32(block, crc32)
            if crc32 != piece.crc32:
                where = f"at {piece.offset}, {piece.num_bytes} bytes"
                raise CheckpointError(f"{path}: wrong checksum ({where})")


def _blocks(file: int, piece: FilePiece) -> Iterator[bytes]:
    stop = piece.offset + piece.num_bytes
    for at in range(piece.offset, stop, BLOCK_BYTES):
        yield os.pread(file, min(BLOCK_BYTES, stop - at), at)
