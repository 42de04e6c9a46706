"""Triton reads its mode when a kernel is decorated, so interpreted tests have a process of their own.

``test_triton_interpreted.py`` runs them; by hand: ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreted"]
