"""Small correct functions, each with assertions about it; bugs.py breaks them.

- The checks pass for each function.
- No loop becomes endless by one changed operator or number.
"""

import msgspec


class CheckedFunction(msgspec.Struct, frozen=True):
    """A function's source, and lines of assertions about it."""

    name: str
    source: str
    checks: str


FUNCTIONS = (
    CheckedFunction(
        "clamp",
        '''def clamp(value, low, high):
    """`value`, or the nearer end of low..high where it lies outside."""
    if value < low:
        return low
    if value > high:
        return high
    return value
''',
        """assert [clamp(n, 2, 5) for n in (-1, 2, 3, 5, 9)] == [2, 2, 3, 5, 5]
""",
    ),
    CheckedFunction(
        "median",
        '''def median(numbers):
    """The middle number; of an even count the mean of the two in the middle."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
''',
        """assert median([5]) == 5
assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5
assert median([10, 0]) == 5
""",
    ),
    CheckedFunction(
        "chunks",
        '''def chunks(items, size):
    """The items in lists of `size`, the last one shorter where they do not fit."""
    found = []
    for start in range(0, len(items), size):
        found.append(items[start : start + size])
    return found
''',
        """assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
assert chunks([1, 2], 2) == [[1, 2]]
assert chunks([], 3) == []
""",
    ),
    CheckedFunction(
        "is_leap_year",
        '''def is_leap_year(year):
    """Every fourth year, but of the full centuries only every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
''',
        """years = (1900, 1996, 2000, 2023, 2024, 2100)
assert [is_leap_year(y) for y in years] == [False, True, True, False, True, False]
""",
    ),
    CheckedFunction(
        "count_changes",
        '''def count_changes(values):
    """How often a value differs from the one before it."""
    changes = 0
    for before, after in zip(values, values[1:]):
        if before != after:
            changes += 1
    return changes
''',
        """assert count_changes([]) == 0
assert count_changes([7, 7, 7]) == 0
assert count_changes([1, 2, 2, 1]) == 2
""",
    ),
    CheckedFunction(
        "overlap",
        '''def overlap(a, b):
    """How much the ranges a and b, each (start, end), have in common; never less than 0."""
    start = max(a[0], b[0])
    end = min(a[1], b[1])
    return max(end - start, 0)
''',
        """assert overlap((0, 5), (3, 9)) == 2
assert overlap((3, 9), (0, 5)) == 2
assert overlap((0, 2), (2, 4)) == 0
assert overlap((0, 1), (5, 6)) == 0
assert overlap((0, 9), (2, 4)) == 2
""",
    ),
)
