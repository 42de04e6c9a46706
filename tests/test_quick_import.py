"""What is left out of an import comes when it is asked for."""

from __future__ import annotations

import subprocess
import sys

from engine.environment import module_environment

PROGRAM = """
import gc, sys
from engine.quick_import import quick_import

gc.enable()
with quick_import():
    from engine.models.errors import ModelLoadError
    import torch
assert gc.isenabled() and gc.get_freeze_count() > 10_000
assert "torch._decomp.decompositions" not in sys.modules
assert not hasattr(torch._meta_registrations, "__file__")
assert float((torch.ones(2, 3) @ torch.ones(3, 2)).sum()) == 12.0

assert callable(torch._meta_registrations.device_hint)
assert "torch._decomp.decompositions" in sys.modules
assert tuple(torch.empty(3, 1, device="meta").expand(3, 2).shape) == (3, 2)

before = gc.get_freeze_count()
with quick_import():
    assert gc.isenabled()
assert gc.get_freeze_count() == before
"""


def test_what_was_left_out_of_torch_comes_when_it_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=module_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
