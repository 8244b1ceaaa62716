"""State that a client's journal passes to the next client, on real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import Published, StateSaved, StepTaken
from tests.unit.serve.client.fake_router import FakeRouter, deliver
from tests.unit.serve.client.test_client import ask


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


def trainers_client(router: FakeRouter, folder: Path, max_bytes: int = 2**30) -> RolloutClient:
    config = JournalConfig(segment_bytes=2**16, max_bytes=max_bytes)
    return RolloutClient(router.hub.address, config, folder, keep=True)


def test_what_no_checkpoint_covers_is_told_to_the_next_trainer(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = trainers_client(router, tmp_path)
    client.start(StateSaved())
    assert client.history == History()
    trained, waiting, still_open, failed = (ask(client, num_drawn=n) for n in range(1, 5))
    deliver(client.address, trained)
    deliver(client.address, waiting)
    client.cancel(failed, "of no use")
    client.note_step(0, [trained])
    client.note_published(3, 1)
    client.done_with([trained, waiting])  # which only a checkpoint releases
    client.close()

    again = trainers_client(router, tmp_path)
    told = again.history
    assert told.steps == (StepTaken(0, (trained,), 0),)
    assert told.published == (Published(3, 1),)
    assert [each.group_id for each in told.results] == [trained, waiting]
    assert [each.reason for each in told.drops] == ["cancelled: of no use"]
    [open_ask] = told.open_asks
    assert (open_ask.group_id, open_ask.task.data) == (still_open, {"n": 1})
    assert (told.num_asked, told.num_drawn) == (4, 4)
    again.start(StateSaved())
    assert [each.group_id for each in again.take(timeout_s=60)] == [waiting]
    opened = again.open(told.results[0])
    assert isinstance(opened, Finished)
    assert opened.group_id == trained
    again.close()


def test_checkpoint_lets_go_of_what_it_knows(router: FakeRouter, tmp_path: Path) -> None:
    client = trainers_client(router, tmp_path, max_bytes=1)
    client.start(StateSaved())
    group_id = ask(client)
    deliver(client.address, group_id)
    client.note_step(0, [group_id])
    full = [client.is_journal_full]
    saved = StateSaved(1, 7, {group_id.run_id: [(0, 1)]})
    client.note_saved(saved)
    client.note_published(8, 1)  # by now the earlier operations are done
    full.append(client.is_journal_full)
    client.close()
    again = trainers_client(router, tmp_path)
    told = again.history
    assert full == [True, False]
    assert told.saved == saved
    assert (told.steps, told.results, told.drops) == ((), (), ())
    assert told.published == (Published(8, 1),)
    again.start(saved)
    assert deliver(again.address, group_id).duplicate
    again.close()
