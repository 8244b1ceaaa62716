"""Arrays that begin like one seen before."""

from rollmesh.runtime.message_trie import MAX_PREFIX_HASHES, MessageNode, PrefixIndex, split_array

START, END = MessageNode(None, b""), MessageNode(None, b"{}")


def test_an_array_that_goes_on_is_known_by_its_beginning() -> None:
    prefixes = PrefixIndex()
    prefixes.add(None, START, b'[{"a":1}]', END, 1)
    found = prefixes.find(START, b'[{"a":1}, {"b":2}]')
    assert found is not None
    assert found.end is END
    assert list(found.rest(b'[{"a":1}, {"b":2}]')) == [b'{"b":2}']
    assert list(found.rest(b'[{"a":1}]')) == []


def test_other_beginnings_and_other_starts_are_not_known() -> None:
    prefixes = PrefixIndex()
    prefixes.add(None, START, b'[{"a":1}]', END, 1)
    assert prefixes.find(START, b'[{"a":2}]') is None
    assert prefixes.find(START, b'[{"a"') is None
    assert prefixes.find(END, b'[{"a":1}]') is None


def test_a_long_line_is_one_stretch_of_few_segments() -> None:
    prefixes = PrefixIndex()
    array = b'[{"n":0}]'
    prefixes.add(None, START, array, END, 1)
    for n in range(1, 50):
        array = array[:-1] + b',{"n":%d}]' % n
        known = prefixes.find(START, array)
        assert known is not None
        assert known.num_units == n
        prefixes.add(known, START, array, END, n + 1)
    assert known is not None
    assert len(known.segments) <= 16


def test_the_newest_few_are_kept() -> None:
    prefixes = PrefixIndex()
    arrays = [b'[{"n":%d}]' % n for n in range(MAX_PREFIX_HASHES + 1)]
    for array in arrays:
        prefixes.add(None, START, array, END, 1)
    assert prefixes.find(START, arrays[0]) is None
    assert all(prefixes.find(START, array) for array in arrays[1:])


def test_space_before_the_bracket_is_no_known_beginning() -> None:
    prefixes = PrefixIndex()
    prefixes.add(None, START, b'[{"a":1} ]', END, 1)
    assert prefixes.find(START, b'[{"a":1} ]') is None
    assert list(split_array(b'[{"a":1} ]')) == [b'{"a":1}']


def test_of_a_history_that_is_edited_at_each_turn_only_some_arrays_are_kept() -> None:
    prefixes = PrefixIndex()
    num_turns = 8 * MAX_PREFIX_HASHES
    known = []
    for n in range(num_turns):
        array = b'[{"n":%d}]' % n
        prefixes.add(None, START, array, END, 1)
        known.append(prefixes.find(START, array) is not None)
    assert all(known[: 2 * MAX_PREFIX_HASHES])
    assert (
        sum(known[2 * MAX_PREFIX_HASHES :])
        == (num_turns - 2 * MAX_PREFIX_HASHES) // MAX_PREFIX_HASHES
    )


def test_a_history_that_is_edited_no_more_is_soon_known_again() -> None:
    prefixes = PrefixIndex()
    for n in range(3 * MAX_PREFIX_HASHES + 1):
        prefixes.add(None, START, b'[{"n":%d}]' % n, END, 1)
    array, num_strange = b'[{"m":0}]', 0
    for m in range(1, 50):
        found = prefixes.find(START, array)
        num_strange += found is None
        prefixes.add(found, START, array, END, m)
        array = array[:-1] + b',{"m":%d}]' % m
    assert num_strange <= MAX_PREFIX_HASHES
