"""Lets PyPI's torchvision be imported beside a torch built for CPUs.

Its wheel is built for CUDA and cannot load its operators there; `_meta_registrations` describes
them to torch, which then has none of that name and refuses. SGLang wants torchvision's transforms
alone, so that module is put in place empty. Python runs this file at its start, by its name.
"""

import sys
from types import ModuleType

sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
