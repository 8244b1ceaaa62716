"""Metrics: sources are read when asked, and appear in Prometheus' text with prefix and unit."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from rollmesh.core.metrics import Exposition, Figure, rss_bytes


class Counts:
    def __init__(self) -> None:
        self.num_asks = 0

    def figures(self) -> Iterator[Figure]:
        yield Figure("router_asks_total", self.num_asks, "Asks received.")
        for worker in ("a", "b"):
            yield Figure("worker_slots_free", 3, "Free slots.", {"worker_id": worker})


def read(exposition: Exposition) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(exposition.render().decode())
    return {
        (sample.name, sample.labels.get("worker_id", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_figures_are_read_at_each_scrape() -> None:
    counts, exposition = Counts(), Exposition("router")
    exposition.add(counts.figures)
    assert read(exposition)["rollmesh_router_asks_total", ""] == 0
    counts.num_asks += 41
    assert read(exposition)["rollmesh_router_asks_total", ""] == 41


def test_labels_make_one_family_of_many_samples() -> None:
    exposition = Exposition("router")
    exposition.add(Counts().figures)
    text = exposition.render().decode()
    assert text.count("# TYPE rollmesh_worker_slots_free gauge") == 1
    assert read(exposition)["rollmesh_worker_slots_free", "b"] == 3


def test_every_name_starts_with_rollmesh_and_a_total_is_a_counter() -> None:
    exposition = Exposition("router")
    exposition.add(Counts().figures)
    text = exposition.render().decode()
    assert "# TYPE rollmesh_router_asks_total counter" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert all(name.startswith("rollmesh_") for name in names)


def test_memory_and_cpu_of_the_process_are_always_there() -> None:
    figures = read(Exposition("router"))
    assert figures["rollmesh_process_rss_bytes", ""] > 10**6
    assert figures["rollmesh_process_cpu_seconds_total", ""] > 0
    assert rss_bytes() > 10**6
