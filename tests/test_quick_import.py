"""What is left out of an import comes when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.environment import module_environment

WITHOUT_A_GPU = """
import gc, sys
from engine import quick_import as module
from engine.quick_import import quick_import

module.GPU_FILES = ()
gc.enable()
with quick_import():
    import torch
assert gc.isenabled() and gc.get_freeze_count() > 10_000
assert "torch._decomp.decompositions" not in sys.modules
assert not hasattr(torch._meta_registrations, "__file__")
assert float((torch.ones(2, 3) @ torch.ones(3, 2)).sum()) == 12.0
first, again = (torch.rand(3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
assert torch.equal(first, again)

assert callable(torch._meta_registrations.device_hint)
assert "torch._decomp.decompositions" in sys.modules
assert tuple(torch.empty(3, 1, device="meta").expand(3, 2).shape) == (3, 2)

before = gc.get_freeze_count()
with quick_import():
    assert gc.isenabled()
assert gc.get_freeze_count() == before
"""
WITH_A_GPU = """
import sys
from engine import quick_import as module

module.GPU_FILES = ("/dev/null",)
with module.quick_import():
    import torch
assert "torch._decomp.decompositions" in sys.modules
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is left out")
@pytest.mark.parametrize("program", [WITHOUT_A_GPU, WITH_A_GPU])
def test_what_is_left_out_of_torch_comes_when_it_is_asked_for(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], env=module_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
