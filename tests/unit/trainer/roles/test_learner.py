"""Rows packed: columns entry by entry, groups together, padding nowhere."""

from typing import Any

import pytest
import torch

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.roles.learner import Row, RowBatch, blank_batch, pack_rows
from tests.unit.trainer.roles.rows import drawn, row


def batch_of(*rows: Row) -> RowBatch:
    return RowBatch(rows, range(len(rows)), "cpu")


def packed(rows: list[Any], weights: list[float], group_size: int, max_tokens: int) -> list[Any]:
    batches = pack_rows(rows, weights, group_size, max_tokens, "cpu")
    return [batch.members for batch in batches]


def test_rows_are_concatenated_and_each_trained_token_has_its_predecessor() -> None:
    batch = batch_of(row([5, 6, 7, 8], num_prompt=2), row([9, 4]))
    assert batch.token_ids_T.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.starts == (0, 4, 6)
    assert batch.targets_N.tolist() == [7, 8, 4]
    assert batch.before_N.tolist() == [1, 2, 4]
    assert batch.ends().tolist() == [3, 5]
    assert batch.num_tokens == 3


def test_without_a_mask_all_but_the_first_token_trains() -> None:
    batch = batch_of({"token_ids": torch.tensor([3, 4, 5])})
    assert batch.targets_N.tolist() == [4, 5]


def test_a_column_has_an_entry_for_each_trained_token_or_each_token_or_is_a_number() -> None:
    batch = batch_of(
        row([5, 6, 7, 8], num_prompt=2, note=torch.tensor([0.5, 1.5])),
        row([9, 4, 3], num_prompt=2, note=torch.tensor([7.0, 8.0, 9.0])),
        row([1, 2, 3], note=4),
    )
    assert batch.column("note").tolist() == [0.5, 1.5, 9.0, 4.0, 4.0]


def test_missing_column_has_its_default() -> None:
    batch = batch_of(row([5, 6, 7]), row([9, 4], note=3.0))
    assert batch.column("note", torch.tensor([1.0, 2.0, 8.0])).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([row([5, 6, 7], note=1.0), row([5, 6])], "note: a row has no such column"),
        ([row([5, 6, 7], note=torch.zeros(5))], r"note: \[5\] entries for a row of 3 tokens, 2 tr"),
        ([row([5, 6, 7], note=torch.zeros(1))], r"note: \[1\] entries for a row of 3 tokens, 2 tr"),
    ],
)
def test_a_column_that_does_not_fit_is_named(rows: list[Row], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        batch_of(*rows).column("note")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (row([5, 6], num_prompt=0), "loss_mask: a row's first token"),
        (row([]), "token_ids: a row has no token"),
        (row([5, 6]) | {"loss_mask": torch.tensor([False])}, "loss_mask: 1 entries for a row of 2"),
    ],
)
def test_a_row_that_cannot_train_is_refused(wrong: Row, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        batch_of(wrong)


def test_values_are_summed_and_split_by_row() -> None:
    batch = batch_of(row([5, 6, 7]), row([9, 4], num_prompt=2), row([1, 2]))
    values_N = torch.tensor([1.0, 2.0, 4.0])
    assert batch.sums(values_N).tolist() == [3.0, 0.0, 4.0]
    assert [each.tolist() for each in batch.split(values_N)] == [[1.0, 2.0], [], [4.0]]


def test_rows_can_be_read_one_by_one_with_their_kept_positions() -> None:
    batch = batch_of(row([5, 6, 7, 8], num_prompt=2), row([9, 4]))
    alone = [(ids.tolist(), kept.tolist()) for ids, kept in batch.alone(batch.before_N)]
    assert alone == [([5, 6, 7, 8], [1, 2]), ([9, 4], [0])]


def test_a_blank_batch_has_tokens_for_a_forward_pass_and_nothing_that_trains() -> None:
    batch = blank_batch(2, "cpu")
    assert (batch.num_tokens, batch.members, batch.starts) == (0, (), (0, 1, 2))
    assert len(batch.ends()) == len(batch.column("any")) == len(batch.sums(torch.zeros(0))) == 0
    assert [len(ids) for ids, _ in batch.alone(batch.before_N)] == [1, 1]


def test_batches_are_within_the_bound_with_rows_of_like_length_together() -> None:
    rows = drawn(0, 9, 3, 8, 2)
    assert packed(rows, [1.0] * 4, 1, 13) == [(3, 1, 2), (0,)]


def test_a_row_longer_than_the_bound_has_a_batch_of_its_own() -> None:
    rows = drawn(0, 20, 3, 4)
    assert packed(rows, [1.0] * 3, 1, 10) == [(1, 2), (0,)]


def test_pairs_stay_together_in_their_order() -> None:
    rows = drawn(0, 9, 3, 2, 2, 1, 8)
    assert packed(rows, [1.0] * 6, 2, 13) == [(2, 3, 4, 5), (0, 1)]
    assert packed(rows, [1.0] * 6, 2, 1) == [(2, 3), (4, 5), (0, 1)]


def test_padding_is_in_no_batch() -> None:
    rows = drawn(0, 4, 5, 6, 7)
    assert packed(rows, [1.0, 0.0, 1.0, 0.0], 1, 100) == [(0, 2)]
    assert packed(rows, [0.0] * 4, 2, 100) == []
