"""Values written before a field existed can still be read."""

import msgspec

from rollmesh.core.types import NodeRow, Outcome, RolloutRecord, VersionRun


def test_an_old_record_is_read_with_its_engines_unrecorded() -> None:
    node = [-1, 2, True, [[3, 2]], "main", None, "stop", False, []]
    old = {"index": 0, "outcome": "completed", "nodes": [node]}
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=RolloutRecord)
    assert record.nodes == [NodeRow(-1, 2, True, (VersionRun(3, 2),), "main", None, "stop")]
    assert record.outcome is Outcome.COMPLETED
    assert (record.engines, record.nodes[0].dialect) == ([], "")
    assert record.nodes[0].policy_versions[0].engine == -1


def test_a_run_names_its_engine_in_one_byte() -> None:
    bytes_of = msgspec.msgpack.encode
    assert len(bytes_of(VersionRun(3, 2, 17))) == len(bytes_of([3, 2])) + 1
