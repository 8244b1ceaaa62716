"""Build docker/k8s/* as `kubectl kustomize` does, for the features that those files use.

Resources, components, configMapGenerator, labels, namespace, and strategic merge patches. A
generated ConfigMap keeps its name, without the hash of its content.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
from ruamel.yaml import YAML

Tree = dict[str, Any]
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""The key by which a patch finds an item of such a list; other lists are replaced."""
CLUSTER_KINDS = ("Namespace",)


class Generator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ConfigMap made of files."""

    name: str
    files: list[str]
    behavior: str = "create"
    namespace: str = ""


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strategic merge patch, in a file or in place."""

    path: str = ""
    patch: str = ""


class Labels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pairs: dict[str, str]


class Kustomization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """kustomization.yaml, with the keys that are understood here."""

    kind: str
    api_version: str
    namespace: str = ""
    resources: list[str] = []
    components: list[str] = []
    config_map_generator: list[Generator] = []
    patches: list[Patch] = []
    labels: list[Labels] = []


def load_all(text: str) -> list[Tree]:
    """Parse the documents of a YAML file."""
    return [each for each in YAML(typ="safe").load_all(text) if each]


def build(folder: Path, below: list[Tree] | None = None) -> list[Tree]:
    """Return the documents of a kustomization; a component changes those of `below`."""
    [tree] = load_all((folder / "kustomization.yaml").read_text())
    made = msgspec.convert(tree, Kustomization)
    documents = list(below or [])
    for name in made.resources:
        path = folder / name
        documents += build(path) if path.is_dir() else load_all(path.read_text())
    for generator in made.config_map_generator:
        _generate(generator, folder, documents)
    for name in made.components:
        documents = build(folder / name, documents)
    for patch in made.patches:
        for each in load_all(patch.patch or (folder / patch.path).read_text()):
            _patch(documents, each)
    for document in documents:
        if made.namespace and document["kind"] not in CLUSTER_KINDS:
            document["metadata"]["namespace"] = made.namespace
        for labels in made.labels:
            document["metadata"].setdefault("labels", {}).update(labels.pairs)
    return documents


def _generate(generator: Generator, folder: Path, documents: list[Tree]) -> None:
    data = {Path(name).name: (folder / name).read_text() for name in generator.files}
    for document in documents:
        if document["kind"] == "ConfigMap" and document["metadata"]["name"] == generator.name:
            assert generator.behavior == "replace"
            document["data"] = data
            return
    assert generator.behavior == "create"
    documents.append(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": generator.name},
            "data": data,
        }
    )


def _patch(documents: list[Tree], patch: Tree) -> None:
    [target] = [
        each
        for each in documents
        if (each["kind"], each["metadata"]["name"]) == (patch["kind"], patch["metadata"]["name"])
    ]
    _merge(target, patch)


def _merge(target: Tree, patch: Tree) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        elif isinstance(value, list) and key in MERGE_KEYS and key in target:
            target[key] = _merged_list(target[key], value, MERGE_KEYS[key])
        else:
            target[key] = _without_nulls(deepcopy(value))


def _merged_list(items: list[Tree], patches: list[Tree], key: str) -> list[Tree]:
    """Merge items by their key; those of the patch come first, as kustomize puts them."""
    rest = deepcopy(items)
    merged = []
    for patch in patches:
        found = next((each for each in rest if each[key] == patch[key]), {})
        rest = [each for each in rest if each is not found]
        if patch.get("$patch") != "delete":
            _merge(found, patch)
            merged.append(found)
    return [*merged, *rest]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value
