"""The environment of torchrun, and the addresses at which ranks meet."""

from typing import Any

import pytest

from rollmesh.core.config import Config, TrainerConfig
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.trainer.joining import TorchrunJob, dialled, numeric, run_rank

ROUTER = "tcp://127.0.0.1:1"


def environment(**changed: str) -> dict[str, str]:
    """The variables of process 5 of 8 on two hosts."""
    return {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    } | changed


def job(**changed: str) -> TorchrunJob:
    found = TorchrunJob.find(environment(**changed))
    assert found
    return found


def trained(**settings: Any) -> Config:
    return Config(trainer=TrainerConfig(**settings))


def test_a_process_of_torchrun_knows_its_place() -> None:
    found = job()
    assert (found.rank, found.num_ranks) == (5, 8)
    assert (found.local_rank, found.num_sharing) == (1, 4)


@pytest.mark.parametrize("variables", [{}, {"RANK": "1"}, environment(WORLD_SIZE="1")])
def test_other_processes_and_a_single_one_have_no_job(variables: dict[str, str]) -> None:
    assert TorchrunJob.find(variables) is None


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="RANK=first: not a number"):
        TorchrunJob.find(environment(RANK="first"))


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_the_number_of_processes_is_the_number_of_ranks(num_ranks: int) -> None:
    trainer = job().applied(trained(num_ranks=num_ranks)).trainer
    assert (trainer.num_ranks, trainer.local_ranks) == (8, 1)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_ranks = 4, and torchrun started 8 processes"):
        job().applied(trained(num_ranks=4))


def test_loopback_is_an_address_only_if_all_ranks_are_on_this_host() -> None:
    assert job(LOCAL_WORLD_SIZE="8").host(ROUTER) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"set trainer\.rank_bind = "):
        job().host(ROUTER)


def test_an_interface_is_replaced_by_its_address() -> None:
    assert numeric("tcp://lo:5557") == "tcp://127.0.0.1:5557"
    assert numeric("tcp://10.0.0.1:5557") == "tcp://10.0.0.1:5557"


def test_a_trainer_on_another_machine_needs_keys() -> None:
    with pytest.raises(AddressError, match="connections to another machine need keys"):
        dialled("tcp://192.0.2.1:5557", None)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_the_settings_do_not_have_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank}: trainer.num_ranks = 2 has ranks 1 to 1"):
        run_rank(trained(num_ranks=2), rank, ROUTER)
