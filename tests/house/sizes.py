"""The size law: limits on the length of a file and a function, and on a class's public methods.

There is no list of exceptions. A file that is too long is split by concept.
"""

from collections.abc import Iterable, Iterator
from statistics import median

from tests.house.source import Fault, Function, Module, methods

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 12
MAX_PUBLIC_METHODS = 14
MAX_PACKAGE_LINES = 40


def file_sizes(module: Module) -> Iterator[Fault]:
    """A file is one concept; a package's __init__.py is mostly its docstring.

    Except the root's, which lists the public names.
    """
    num_lines = len(module.text.splitlines())
    is_package = module.file_name == "__init__.py" and module.path != "rollmesh/__init__.py"
    limit = MAX_PACKAGE_LINES if is_package else MAX_FILE_LINES
    if num_lines > limit:
        yield module.fault(1, f"{num_lines} lines; at most {limit}")


def function_sizes(module: Module) -> Iterator[Fault]:
    """Docstring and signature count; decorators do not."""
    for function in module.functions():
        num_lines = length(function)
        if num_lines > MAX_FUNCTION_LINES:
            what = f"{function.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"
            yield module.fault(function, what)


def class_sizes(module: Module) -> Iterator[Fault]:
    """Public methods, a property and its setter counted once."""
    for owner in module.classes():
        public = {each.name for each in methods(owner) if not each.name.startswith("_")}
        if len(public) > MAX_PUBLIC_METHODS:
            what = f"{owner.name} has {len(public)} public methods; at most {MAX_PUBLIC_METHODS}"
            yield module.fault(owner, what)


def median_function(modules: Iterable[Module]) -> float:
    """Lines of the middle function of all."""
    lengths = [length(function) for module in modules for function in module.functions()]
    return median(lengths) if lengths else 0


def length(function: Function) -> int:
    """Lines from `def` to the end of the body."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1
