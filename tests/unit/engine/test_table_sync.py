"""A worker's copy of the fleet table is right or older, whatever the network does to messages."""

import random

import msgspec
import pytest

from rollmesh.engine.table_sync import NOTICEABLE, TableCopy, TableFeed, checksum, load_of
from rollmesh.wire.fleet import (
    EnginePhase,
    EngineRow,
    EnginesChanged,
    FleetChanged,
    LoadsChanged,
    TableDigest,
    TableMessage,
)

PUSH_S, DIGEST_S, SETTLE_S = 1.0, 10.0, 0.02
NUM_TURNS = 400


def row(number: int, policy_version: int = 0, running: int = 0) -> EngineRow:
    url = f"http://e:{number}"
    return EngineRow(url, "i1", EnginePhase.READY, policy_version, running)


class Source:
    """A router: a table, its feed, and its incarnation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[str, EngineRow] = {}
        self.published = -1
        self.feed = TableFeed(PUSH_S, DIGEST_S, SETTLE_S)
        self.sums = {0: checksum((), -1, True)}
        """Checksums of its tables by epoch."""

    def set(self, *rows: EngineRow) -> None:
        for each in rows:
            self.rows[each.url] = each

    def step(self, now_s: float) -> list[TableMessage]:
        self.look()
        self.sums[self.feed.epoch] = checksum(self.rows.values(), self.published, True)
        return self.feed.take(now_s)

    def look(self) -> None:
        removed = self.feed.forgotten(self.rows.keys())
        self.feed.look(self.rows.values(), removed, self.published, True)

    def table(self) -> FleetChanged:
        return FleetChanged(self.feed.epoch, tuple(self.rows.values()), self.published, True)


def followed(source: Source, now_s: float = 0.0) -> TableCopy:
    """A copy that has the whole table."""
    source.step(now_s)
    copy = TableCopy()
    copy.take(source.table(), source.name)
    return copy


@pytest.fixture
def source() -> Source:
    source = Source("r1")
    source.set(*(row(number) for number in range(20)))
    return source


def test_a_change_is_one_row_and_the_copy_follows(source: Source) -> None:
    copy = followed(source)
    source.set(row(3, policy_version=1))
    del source.rows["http://e:5"]
    [message] = source.step(0.5)
    assert isinstance(message, EnginesChanged)
    assert (message.engines, message.removed) == ((row(3, 1),), ("http://e:5",))
    copy.take(message, "r1")
    assert copy.rows == source.rows
    assert not copy.take_ask()


def test_only_noticeable_loads_are_sent(source: Source) -> None:
    source.set(row(1, running=80), row(2, running=80), row(3, running=0))
    copy = followed(source)
    source.set(row(1, running=90), row(2, running=91), row(3, running=1))
    [message] = source.step(1.0)
    assert message == LoadsChanged(source.feed.epoch, places_of(source, 2, 3), (91, 1))
    copy.take(message, "r1")
    assert (copy.loads["http://e:1"], copy.loads["http://e:2"]) == (80, 91)
    [digest] = source.step(DIGEST_S)
    assert isinstance(digest, TableDigest)
    copy.take(digest, "r1")
    assert copy.loads["http://e:1"] == 90


def places_of(source: Source, *numbers: int) -> tuple[int, ...]:
    order = sorted(source.rows)
    return tuple(sorted(order.index(f"http://e:{number}") for number in numbers))


def test_if_most_loads_moved_all_are_sent_without_places(source: Source) -> None:
    copy = followed(source)
    source.set(*(row(number, running=100 + number) for number in range(20)))
    [message] = source.step(1.0)
    assert isinstance(message, LoadsChanged)
    assert (message.places, len(message.loads)) == ((), 20)
    copy.take(message, "r1")
    assert copy.loads["http://e:7"] == 107


def test_loads_alone_do_not_change_the_epoch(source: Source) -> None:
    followed(source)
    epoch = source.feed.epoch
    source.set(row(1, running=50))
    source.step(1.0)
    assert source.feed.epoch == epoch


def test_a_copy_that_missed_a_change_asks_once_and_again_after_a_second(source: Source) -> None:
    copy = followed(source)
    source.set(row(1, 1))
    source.step(0.5)  # lost
    for policy_version in (2, 3):
        source.set(row(2, policy_version))
        [message] = source.step(0.5 + 0.1 * policy_version)
        copy.take(message, "r1")
    assert copy.take_ask()
    assert not copy.take_ask()
    [beat] = source.step(1.5)
    copy.take(beat, "r1")
    assert copy.take_ask()  # what it asked for may be lost
    copy.take(source.table(), "r1")
    assert copy.rows == source.rows
    assert not copy.take_ask()


def test_a_beat_alone_shows_that_a_change_was_missed(source: Source) -> None:
    copy = followed(source)
    source.set(row(1, 1))
    [_, beat] = source.step(1.0)
    copy.take(beat, "r1")
    assert copy.take_ask()


def test_a_digest_finds_a_copy_that_differs(source: Source) -> None:
    copy = followed(source)
    copy.rows["http://e:1"] = row(1, 9)
    [digest] = source.step(DIGEST_S)
    copy.take(digest, "r1")
    assert copy.take_ask()


def test_a_new_router_is_asked_for_its_table(source: Source) -> None:
    copy = followed(source)
    later = Source("r2")
    later.set(row(1))
    for message in later.step(0.0):
        copy.take(message, "r2")
    assert copy.take_ask()
    assert copy.rows == source.rows
    copy.take(later.table(), "r2")
    assert copy.rows == later.rows


def test_a_copy_that_is_newer_than_the_base_takes_the_changes(source: Source) -> None:
    source.step(0.0)
    source.set(row(1, 1))
    source.look()  # known, not sent yet
    copy = TableCopy()
    copy.take(source.table(), "r1")
    source.set(row(2, 2))
    [message] = source.step(0.5)
    copy.take(message, "r1")
    assert copy.rows == source.rows
    assert not copy.take_ask()


class Faults:
    """A network between routers and one copy, which loses, repeats and delays messages."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.sources = [Source("r1")]
        self.copy = TableCopy()
        self.now_s = 0.0
        self._wire: list[tuple[float, str, TableMessage]] = []
        self._asks = 0

    def turn(self, *, is_faulty: bool) -> None:
        """Let a tenth of a second pass."""
        self.now_s += 0.1
        source = self.sources[-1]
        if is_faulty:
            change(source, self.dice)
            if self.dice.random() < 0.01:
                self.sources.append(Source(f"r{len(self.sources) + 1}"))
                source = self.sources[-1]
        messages = source.step(self.now_s)
        self._send([*messages, *[source.table()] * self._asks], source.name, is_faulty)
        self._asks = 0
        due = [each for each in self._wire if each[0] <= self.now_s]
        for arrival in sorted(due, key=lambda each: each[0]):
            self._wire.remove(arrival)
            self._arrive(arrival[2], arrival[1], is_faulty)

    def _send(self, messages: list[TableMessage], name: str, is_faulty: bool) -> None:
        for message in messages:
            for _ in range(self.dice.choice((0, 1, 1, 1, 2)) if is_faulty else 1):
                is_late = is_faulty and self.dice.random() < 0.3
                late_s = self.dice.expovariate(2.0) if is_late else 0.0
                self._wire.append((self.now_s + late_s, name, message))

    def _arrive(self, message: TableMessage, name: str, is_faulty: bool) -> None:
        self.copy.take(message, name)
        self._asks += self.copy.take_ask() and not (is_faulty and self.dice.random() < 0.3)
        self.check_held()

    def check_held(self) -> None:
        """Assert that the copy is one that its router had."""
        name, epoch = self.copy.place()
        for source in self.sources:
            if source.name == name:
                rows, copy = self.copy.rows.values(), self.copy
                found = checksum(rows, copy.published, copy.has_publisher)
                assert found == source.sums[epoch]
        assert self.copy.loads.keys() == self.copy.rows.keys()


@pytest.mark.parametrize("seed", range(150))
def test_a_copy_is_right_or_older_under_loss_repetition_and_reordering(seed: int) -> None:
    network = Faults(seed)
    for number in range(NUM_TURNS):
        network.turn(is_faulty=number < NUM_TURNS * 3 // 4)
    source, copy = network.sources[-1], network.copy
    assert copy.place() == (source.name, source.feed.epoch)
    assert copy.rows.keys() == source.rows.keys()
    assert all(
        abs(copy.loads[url] - load_of(each)) <= copy.loads[url] // NOTICEABLE
        for url, each in source.rows.items()
    )


def change(source: Source, dice: random.Random) -> None:
    """Change a few rows: loads, versions, arrivals and removals."""
    for _ in range(dice.randrange(4)):
        number = dice.randrange(12)
        url = f"http://e:{number}"
        known = source.rows.get(url)
        chance = dice.random()
        if known is None or chance < 0.2:
            source.set(row(number, dice.randrange(5), dice.randrange(200)))
        elif chance < 0.3:
            del source.rows[url]
        elif chance < 0.4:
            source.published += 1
        else:
            source.set(msgspec.structs.replace(known, num_running=dice.randrange(200)))
