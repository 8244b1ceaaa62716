"""Let PyPI's torchvision be imported beside a torch built for CPUs.

Its wheel is built for CUDA and cannot load its operators there; `_meta_registrations` describes
them to torch, which does not have them and refuses. SGLang needs only torchvision's transforms, so
an empty module replaces that one. Python runs this file at its start, because of its name.
"""

import sys
from types import ModuleType

sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
