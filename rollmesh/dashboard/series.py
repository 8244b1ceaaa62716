"""Rows of named numbers in time order, thinned so that any run fits in bounded memory.

Invariant: at most `max_rows` rows and `max_names` names are held; when full, neighbours are joined
into their means and from then on each row stands for twice as many. Driven by `view`.
"""

Numbers = dict[str, float]


class Series:
    """A plot's data: append only, thinning itself."""

    def __init__(self, max_rows: int = 1000, max_names: int = 64) -> None:
        """`max_rows` must be even."""
        assert max_rows % 2 == 0
        self.num_thinnings = 0
        """Grows when old rows changed; whoever holds a copy must take it anew."""
        self._rows: list[Numbers] = []
        self._waiting: list[Numbers] = []
        self._names: set[str] = set()
        self._max_rows = max_rows
        self._max_names = max_names

    def append(self, row: Numbers) -> Numbers | None:
        """Add a row; the row that a plot gains by it, or None while it waits to be joined."""
        self._waiting.append(self._known(row))
        if len(self._waiting) < 2**self.num_thinnings:
            return None
        joined = mean_of(self._waiting)
        self._waiting = []
        self._rows.append(joined)
        if len(self._rows) == self._max_rows:
            self._rows = [mean_of(self._rows[at : at + 2]) for at in range(0, self._max_rows, 2)]
            self.num_thinnings += 1
        return joined

    def rows(self) -> list[Numbers]:
        """What a plot shows now, oldest first."""
        return list(self._rows)

    def _known(self, row: Numbers) -> Numbers:
        for name in row:
            if len(self._names) < self._max_names:
                self._names.add(name)
        return {name: value for name, value in row.items() if name in self._names}


def mean_of(rows: list[Numbers]) -> Numbers:
    """Name by name, over the rows that have it.

    >>> mean_of([{"a": 1.0}, {"a": 3.0, "b": 5.0}])
    {'a': 2.0, 'b': 5.0}
    """
    names = {name: None for row in rows for name in row}
    means = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        means[name] = sum(values) / len(values)
    return means
