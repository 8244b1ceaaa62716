"""The size law: how long a file, a function, a class and a list of parameters may be.

Owns the numbers; the checks are pure, from a Module to its Faults. Invariant: no allowlist; what
is too long is cut in two along a noun.
"""

from collections.abc import Iterable, Iterator
from statistics import median

from tests.house.source import Fault, Function, Module, decorators, methods

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 12
MAX_PUBLIC_METHODS = 14
MAX_INIT_PARAMETERS = 7
MAX_PACKAGE_LINES = 40


def file_sizes(module: Module) -> Iterator[Fault]:
    """A file is one noun; a package's __init__.py is mostly its docstring."""
    num_lines = len(module.text.splitlines())
    limit = MAX_PACKAGE_LINES if module.file_name == "__init__.py" else MAX_FILE_LINES
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


def init_parameters(module: Module) -> Iterator[Fault]:
    """Parameters of __init__ besides self; more belong into a frozen struct."""
    for owner in module.classes():
        for method in methods(owner):
            if method.name == "__init__" and num_parameters(method) > MAX_INIT_PARAMETERS:
                what = f"{owner.name}.__init__ takes {num_parameters(method)} parameters"
                yield module.fault(method, f"{what}; at most {MAX_INIT_PARAMETERS}")


def median_function(modules: Iterable[Module]) -> float:
    """Lines of the middle function of all."""
    lengths = [length(function) for module in modules for function in module.functions()]
    return median(lengths) if lengths else 0


def length(function: Function) -> int:
    """Lines from `def` to the end of the body."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(method: Function) -> int:
    """Parameters of every kind, without self."""
    arguments = method.args
    named = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    starred = sum(each is not None for each in (arguments.vararg, arguments.kwarg))
    return named + starred - (0 if "staticmethod" in decorators(method) else 1)
