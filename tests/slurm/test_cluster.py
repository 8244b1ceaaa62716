"""The cluster of these tests is one: steps on nodes with addresses and GPUs of their own."""

from tests.slurm.cluster import SlurmCluster


def test_each_node_has_an_address_and_a_name_of_its_own(cluster: SlurmCluster) -> None:
    written = cluster.run("srun", "-N3", "sh", "-c", "echo $(hostname) $(hostname -I)").stdout
    addresses = {f"{node} {cluster.network[node].address}" for node in cluster.nodes}
    assert len(found := {*written.splitlines()}) == 3
    assert found <= addresses


def test_a_step_gets_the_gpus_of_its_node(cluster: SlurmCluster) -> None:
    done = cluster.run("srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert done.stdout.split() == ["0,1", "0,1"]
