"""Keys are the same in every process, whatever its hash is salted with."""

import os
import subprocess
import sys
import zlib

from rollmesh.runtime.message_trie import TAIL_BYTES, key_of, unit_key

PROGRAM = """from rollmesh.runtime.message_trie import key_of, unit_key
print(key_of(b'a' * 9000, b'b'), unit_key(b'c' * 9000))
"""


def test_another_process_knows_a_text_by_the_same_key() -> None:
    for salt in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": salt}
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, check=True
        )
        keys = key_of(b"a" * 9000, b"b"), unit_key(b"c" * 9000)
        assert tuple(map(int, told.stdout.split())) == keys


def test_texts_that_differ_anywhere_have_other_keys() -> None:
    text = b"x" * (3 * TAIL_BYTES)
    others = [text[:at] + b"y" + text[at + 1 :] for at in range(0, len(text), 511)]
    all_texts = [text, text + b"x", *others]
    assert len({key_of(each) for each in all_texts}) == len(all_texts)
    assert len({unit_key(each) for each in all_texts}) == len(all_texts)


def test_two_units_of_one_length_and_crc_have_other_keys() -> None:
    # "plumless" and "buckeroo" are a known collision of CRC-32.
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    assert unit_key(b"plumless") != unit_key(b"buckeroo")


def test_bytes_that_move_from_one_part_to_the_next_change_the_key() -> None:
    assert len({key_of(b"ab", b"c"), key_of(b"a", b"bc"), key_of(b"abc"), key_of(b"abc", b"")}) == 4


def test_a_key_fits_a_signed_integer_of_64_bits() -> None:
    assert all(-(2**63) <= key_of(b"%d" % n) < 2**63 for n in range(1000))
