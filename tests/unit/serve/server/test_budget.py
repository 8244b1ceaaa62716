"""A worker's budget of bytes: full at the limit, light well below it, and never full for good."""

from rollmesh.serve.server.worker_machine import ROOM_SHARE, Budget, BudgetState

LIMIT = 1000
ROOM = int(ROOM_SHARE * LIMIT)


def states(*held: int, has_groups: bool = True) -> list[BudgetState]:
    budget, seen = Budget(LIMIT), []
    for num_bytes in held:
        budget.weigh(num_bytes, has_groups=has_groups)
        seen.append(budget.state)
    return seen


def test_full_at_the_limit_and_light_only_well_below_it() -> None:
    light, full = BudgetState.LIGHT, BudgetState.FULL
    assert states(ROOM, LIMIT - 1, LIMIT, LIMIT - 1, ROOM, ROOM - 1, ROOM, LIMIT) == [
        light, light, full, full, full, light, light, full,
    ]  # fmt: skip


def test_without_groups_it_is_never_full() -> None:
    assert states(LIMIT, 10 * LIMIT, has_groups=False) == [BudgetState.LIGHT] * 2


def test_it_says_what_it_waits_for() -> None:
    budget = Budget(LIMIT)
    assert budget.waits_for == ""
    budget.weigh(LIMIT + 1, has_groups=True)
    assert budget.waits_for == "held_bytes: 1001 held, worker.max_held_bytes = 1000"
