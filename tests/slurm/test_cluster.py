"""The cluster of these tests is one: steps on nodes with addresses and GPUs; a node that dies."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster, why_not


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if why := why_not():
        pytest.skip(why)
    with SlurmCluster(num_nodes=2, num_gpus=2) as cluster:
        yield cluster


def test_each_node_has_an_address_and_a_name_of_its_own(cluster: SlurmCluster) -> None:
    written = cluster.run("srun", "-N2", "sh", "-c", "echo $(hostname) $(hostname -I)").stdout
    addresses = [f"{node} {cluster.network[node].address}" for node in cluster.nodes]
    assert sorted(written.splitlines()) == addresses


def test_a_step_gets_the_gpus_of_its_node(cluster: SlurmCluster) -> None:
    done = cluster.run("srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert done.stdout.split() == ["0,1", "0,1"]


@pytest.mark.slow
def test_a_node_dies_and_returns(cluster: SlurmCluster) -> None:
    cluster.kill_node("n1")
    cluster.wait_until(lambda: "DOWN" in cluster.state("n1"), 60)
    cluster.start_node("n1")
    cluster.wait_until(lambda: cluster.state("n1") == "IDLE", 60)
    assert cluster.run("srun", "--nodelist=n1", "hostname").stdout.strip() == "n1"
