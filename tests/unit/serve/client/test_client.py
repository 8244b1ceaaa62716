"""RolloutClient on real sockets: each result is handed out once, and requests survive a restart."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.addresses import own_address, split_address
from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import AddressError, ConfigError, JournalError, Overloaded, WireError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import (
    MAX_OPEN,
    Dropped,
    Finished,
    RolloutClient,
    address_here,
    listen,
)
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import Published, StateSaved, StepTaken
from rollmesh.wire.frames import decode_ask
from rollmesh.wire.keys import new_keys
from rollmesh.wire.messages import (
    AskGroup,
    AskRefused,
    CancelGroup,
    ClientHello,
    ClientLeft,
    GroupAcked,
    GroupFailed,
)
from tests.unit.serve.client.fake_router import FakeRouter, deliver

CONFIG = JournalConfig(segment_bytes=2**16)


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


def open_client(router: FakeRouter, folder: Path, keep: bool = False) -> RolloutClient:
    client = RolloutClient(router.hub.address, CONFIG, folder, keep=keep)
    client.start()
    return client


def ask(client: RolloutClient, num_drawn: int = 0) -> GroupId:
    return client.ask(
        Task(id="t", data={"n": 1}),
        env="guess",
        num_samples=2,
        sampling=SamplingPolicy(),
        seed=5,
        num_drawn=num_drawn,
    )


def test_a_request_reaches_the_router_and_its_result_is_acked_and_taken(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    _, message, packet = router.expect(AskGroup)
    assert (message.group_id, message.env, message.num_samples) == (group_id, "guess", 2)
    assert message.sink == client.address
    assert decode_ask(packet.body).seed == 5
    assert deliver(client.address, group_id) == GroupAcked(group_id, 1, duplicate=False)
    [finished] = client.take(timeout_s=60)
    assert isinstance(finished, Finished)
    assert finished.group_id == group_id
    assert deliver(client.address, group_id, attempt=2) == GroupAcked(group_id, 2, duplicate=True)
    assert client.take(timeout_s=0) == []
    client.close()
    router.expect(ClientLeft)


def test_a_cancelled_group_is_handed_out_as_dropped(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    router.expect(AskGroup)
    client.cancel(group_id, "no longer needed")
    assert client.take(timeout_s=60) == [Dropped(group_id, "cancelled: no longer needed")]
    _, message, _ = router.expect(CancelGroup)
    assert message.group_id == group_id
    assert deliver(client.address, group_id).duplicate
    client.close()


def test_a_failed_group_is_handed_out_as_dropped(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    route, _, _ = router.expect(AskGroup)
    router.send(route, GroupFailed(group_id, "env_failed: no such module"))
    assert client.take(timeout_s=60) == [Dropped(group_id, "env_failed: no such module")]
    client.close()


def test_untaken_results_are_handed_out_again_after_a_restart(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    trained, waiting = ask(client), ask(client)
    for group_id in (trained, waiting):
        deliver(client.address, group_id)
    client.note_step(0, [trained])
    client.note_published(1, 1)
    client.close()
    again = open_client(router, tmp_path)
    [finished] = again.take(timeout_s=60)
    assert finished.group_id == waiting
    assert deliver(again.address, trained).duplicate
    assert ask(again).run_id != trained.run_id
    again.close()


def test_requests_wait_while_the_journal_is_full(router: FakeRouter, tmp_path: Path) -> None:
    client = RolloutClient(router.hub.address, JournalConfig(max_bytes=1), tmp_path)
    client.start()
    group_id = ask(client)
    client.note_step(0, [])  # the earlier request has been carried out by now
    router.expect(ClientHello)
    client.cancel(group_id, "gave up")
    assert client.take(timeout_s=60) == [Dropped(group_id, "cancelled: gave up")]
    client.close()
    router.expect(ClientLeft)
    assert not any(isinstance(packet.message, AskGroup) for _, packet in router.packets)


def test_take_returns_nothing_after_its_timeout(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    assert client.take(timeout_s=0.01) == []
    client.close()


def test_an_invalid_address_is_a_one_line_error(router: FakeRouter, tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="nonsense"):
        RolloutClient("nonsense", CONFIG, tmp_path / "a")
    with pytest.raises(AddressError, match="cannot listen"):
        RolloutClient(router.hub.address, CONFIG, tmp_path / "b", bind=router.hub.address)


def test_two_clients_do_not_share_a_journal(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    with pytest.raises(JournalError, match="another process"):
        RolloutClient(router.hub.address, CONFIG, tmp_path)
    client.close()


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [("", own_address()), ("gpu-1", "gpu-1"), ("tcp://nat.example:30556", "nat.example")],
)
def test_a_sink_on_all_interfaces_has_an_address_that_workers_can_reach(
    router: FakeRouter, tmp_path: Path, advertise: str, expected: str
) -> None:
    keys = new_keys(tmp_path / "keys")
    with closing(
        RolloutClient(
            router.hub.address, CONFIG, tmp_path, keys, bind="tcp://0.0.0.0:0", advertise=advertise
        )
    ) as client:
        assert split_address(client.address)[0] == expected


def test_a_client_that_comes_back_has_its_address_again(router: FakeRouter, tmp_path: Path) -> None:
    keys = new_keys(tmp_path / "keys")
    addresses = []
    for _ in range(2):
        with closing(
            RolloutClient(
                router.hub.address,
                CONFIG,
                tmp_path,
                keys,
                bind="tcp://0.0.0.0:0",
                advertise="gpu-1",
                keep=True,
            )
        ) as client:
            client.start()
            ask(client)
            addresses.append(client.address)
    assert addresses[0] == addresses[1]


def test_weight_and_keep_are_sent_in_the_hello(router: FakeRouter, tmp_path: Path) -> None:
    client = RolloutClient(router.hub.address, CONFIG, tmp_path, weight=3, keep=True)
    client.start()
    _, hello, _ = router.expect(ClientHello)
    assert (hello.weight, hello.keep) == (3, True)
    client.close()


def test_an_invalid_weight_is_a_one_line_error(router: FakeRouter, tmp_path: Path) -> None:
    for weight in (0, -1, 2**70):
        with pytest.raises(ConfigError, match="weight = "):
            RolloutClient(router.hub.address, CONFIG, tmp_path, weight=weight)
    assert list(tmp_path.iterdir()) == []


def test_the_next_client_of_a_folder_continues_kept_groups(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path, keep=True)
    finished, still_open, failed = (ask(client) for _ in range(3))
    _, first, _ = router.expect(AskGroup)
    deliver(client.address, finished)
    client.cancel(failed, "of no use")
    assert {arrival.group_id for _ in range(2) for arrival in client.take(5)} <= {finished, failed}
    address = client.address
    client.close()

    again = open_client(router, tmp_path, keep=True)
    assert again.address == address
    assert again.reopened == {still_open: Task(id="t", data={"n": 1})}
    request, packet = first, None
    while request.attempts == 0:  # the first message may still be on its way
        _, request, packet = router.expect(AskGroup)
    assert (request.group_id, request.client_id, request.sink) == (
        still_open,
        first.client_id,
        address,
    )
    assert request.attempts == 1
    assert packet
    assert decode_ask(packet.body).seed == 5
    [restored] = again.take(timeout_s=60)
    assert restored.group_id == finished
    assert not deliver(address, still_open).duplicate
    [late] = again.take(timeout_s=60)
    assert isinstance(late, Finished)
    assert late.group_id == still_open
    assert again.reopened == {}
    again.close()
    assert not any(isinstance(packet.message, ClientLeft) for _, packet in router.packets)


def test_a_kept_group_gets_a_new_address_when_the_old_one_is_in_use(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path, keep=True)
    group_id, address = ask(client), client.address
    router.expect(AskGroup)
    client.close()
    other_sink = listen("tcp://127.0.0.1:0", address, None)
    assert other_sink.address == address
    again = open_client(router, tmp_path, keep=True)
    _, request, _ = router.expect(AskGroup)
    assert (request.group_id, request.sink) == (group_id, again.address)
    assert again.address != address
    again.close()
    other_sink.close()


@pytest.mark.parametrize("for_good", [True, False])
def test_a_client_with_keep_can_leave_for_good(
    router: FakeRouter, tmp_path: Path, for_good: bool
) -> None:
    client = open_client(router, tmp_path, keep=True)
    ask(client)
    _, asked, _ = router.expect(AskGroup)
    client.close(for_good=for_good)
    other = open_client(router, tmp_path / "other")
    ask(other)
    router.expect(AskGroup)
    other.close()  # the folder retains nothing
    _, left, _ = router.expect(ClientLeft)
    assert (left.client_id == asked.client_id) is for_good


def test_kept_groups_end_when_the_next_client_does_not_keep(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path, keep=True)
    group_id = ask(client)
    router.expect(AskGroup)
    client.close()
    again = open_client(router, tmp_path)
    assert again.take(5) == [Dropped(group_id, "cancelled: its client was restarted")]
    assert again.reopened == {}
    again.close()


def test_released_results_are_not_handed_out_again(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    done, waiting = ask(client), ask(client)
    for group_id in (done, waiting):
        deliver(client.address, group_id)
    client.done_with([done])
    client.close()
    again = open_client(router, tmp_path)
    assert [arrival.group_id for arrival in again.take(timeout_s=60)] == [waiting]
    again.close()


def test_a_request_past_the_limit_is_refused_until_a_result_is_taken(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    group_id, *_ = [ask(client) for _ in range(MAX_OPEN)]
    with pytest.raises(Overloaded, match=str(MAX_OPEN)) as refused:
        ask(client)
    assert refused.value.retry_after_s > 0
    client.cancel(group_id, "room")
    assert len(client.take(timeout_s=60)) == 1
    ask(client)
    client.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"priority": 2**70}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"num_samples": 2.0}, "num_samples"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"env": "g\ud800ess"}, "surrogates"),
    ],
)
def test_an_invalid_request_is_refused_and_affects_no_other(
    router: FakeRouter, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    client = open_client(router, tmp_path)
    good: dict[str, Any] = {"env": "guess", "num_samples": 2}
    with pytest.raises(WireError, match=message):
        client.ask(Task(id="t"), sampling=SamplingPolicy(), seed=5, **{**good, **wrong})
    ask(client)
    assert router.expect(AskGroup)[1].num_samples == 2
    client.close()


def test_a_negative_deadline_has_passed(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    client.ask(
        Task(id="t"), env="guess", num_samples=2, sampling=SamplingPolicy(), seed=5, deadline_s=-3.0
    )
    [dropped] = client.take(5)
    assert isinstance(dropped, Dropped)
    assert dropped.reason.startswith("deadline: ")
    client.close()


def test_a_request_without_patience_ends_at_the_first_refusal(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    task = Task(id="t")
    group_id = client.ask(
        task, env="guess", num_samples=2, sampling=SamplingPolicy(), seed=5, patience_s=0.0
    )
    route, _, _ = router.expect(AskGroup)
    router.send(route, AskRefused(group_id, "overloaded: 9 groups wait", 1.5))
    assert client.take(5) == [Dropped(group_id, "overloaded: 9 groups wait", retry_after_s=1.5)]
    client.close()


def test_a_watcher_is_called_once_until_the_results_are_taken(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    calls: list[int] = []
    client.watch(lambda: calls.append(1))
    for group_id in (ask(client), ask(client)):
        deliver(client.address, group_id)
    client.note_step(0, [])
    assert calls == [1]
    client.take(timeout_s=60)
    deliver(client.address, ask(client))
    client.note_step(0, [])
    assert calls == [1, 1]
    client.watch(None)
    client.take(timeout_s=60)
    deliver(client.address, ask(client))
    client.note_step(0, [])
    assert calls == [1, 1]
    client.close()


def test_the_sink_listens_on_an_address_that_the_router_can_reach() -> None:
    assert address_here("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert address_here("tcp://[::1]:5555") in ("::1", own_address())  # without IPv6 the latter
    assert address_here("tcp://no such host:5555") == own_address()


def test_closing_a_client_twice_closes_no_file_opened_since(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    client.close()
    freed = before - set(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        files: dict[str, FileIO] = {}
        while freed - files.keys():  # the system assigns the lowest free descriptor
            file = stack.enter_context((tmp_path / f"file{len(files)}").open("w+b", buffering=0))
            files[str(file.fileno())] = file
        client.close()
        client.take(timeout_s=0)
        client.close(for_good=True)
        for file in files.values():
            assert os.fstat(file.fileno()).st_size == 0


def trainers_client(router: FakeRouter, folder: Path, max_bytes: int = 2**30) -> RolloutClient:
    config = JournalConfig(segment_bytes=2**16, max_bytes=max_bytes)
    return RolloutClient(router.hub.address, config, folder, keep=True)


def test_the_next_trainer_gets_all_events_that_no_checkpoint_covers(
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
    client.done_with([trained, waiting])  # only a checkpoint releases them
    client.close()

    again = trainers_client(router, tmp_path)
    history = again.history
    assert history.steps == (StepTaken(0, (trained,), 0),)
    assert history.published == (Published(3, 1),)
    assert [each.group_id for each in history.results] == [trained, waiting]
    assert [each.reason for each in history.drops] == ["cancelled: of no use"]
    [open_ask] = history.open_asks
    assert (open_ask.group_id, open_ask.task.data) == (still_open, {"n": 1})
    assert (history.num_asked, history.num_drawn) == (4, 4)
    again.start(StateSaved())
    assert [each.group_id for each in again.take(timeout_s=60)] == [waiting]
    opened = again.open(history.results[0])
    assert isinstance(opened, Finished)
    assert opened.group_id == trained
    again.close()


def test_a_checkpoint_releases_the_events_that_it_covers(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = trainers_client(router, tmp_path, max_bytes=1)
    client.start(StateSaved())
    group_id = ask(client)
    deliver(client.address, group_id)
    client.note_step(0, [group_id])
    full = [client.is_journal_full]
    saved = StateSaved(1, 7, {group_id.run_id: [(0, 1)]})
    client.note_saved(saved)
    client.note_published(8, 1)  # the earlier operations are done by now
    full.append(client.is_journal_full)
    client.close()
    again = trainers_client(router, tmp_path)
    history = again.history
    assert full == [True, False]
    assert history.saved == saved
    assert (history.steps, history.results, history.drops) == ((), (), ())
    assert history.published == (Published(8, 1),)
    again.start(saved)
    assert deliver(again.address, group_id).duplicate
    again.close()
