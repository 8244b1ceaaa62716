"""The simulator's kernel: the order of calls to a frozen node."""

from rollmesh.testing.mesh_sim.kernel import Kernel, Node


def test_calls_to_a_node_frozen_twice_run_in_due_order() -> None:
    kernel, node, ran = Kernel(0), Node("worker-0"), list[str]()
    node.freeze(2.0)
    kernel.after(3.0, lambda: ran.append("third"), node)
    kernel.after(1.0, lambda: ran.append("first"), node)
    kernel.run(100, 1.2)
    node.freeze(4.0)  # "first" waits for the end of the shorter freeze
    kernel.after(0.3, lambda: ran.append("second"), node)
    kernel.run(100, 3.9)
    assert ran == []
    kernel.run(100, 4.0)
    assert ran == ["first", "second", "third"]
