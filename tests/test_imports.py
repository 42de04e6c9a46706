"""What the window's process may load: nothing heavy, whatever it imports, so that it opens in under a second."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import app
from engine.environment import module_environment

HEAVY = {"torch", "triton", "transformers", "gguf", "safetensors", "tokenizers", "huggingface_hub", "numba"}
LIGHT_ENGINE_MODULES = [
    "engine.client",
    "engine.compare_html",
    "engine.comparison",
    "engine.comparison_words",
    "engine.config",
    "engine.environment",
    "engine.events",
    "engine.export",
    "engine.failures",
    "engine.fetch_events",
    "engine.lanes",
    "engine.messages",
    "engine.metrics",
    "engine.model_catalog",
    "engine.recorded_run",
    "engine.recording",
    "engine.request",
    "engine.run_state",
    "engine.saturation",
    "engine.traces",
    "engine.variants",
    "engine.wire",
    "engine.workload",
]


def modules_after(code: str, tmp_path: Path) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``, run in a folder that is not ours."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\nimport sys; print(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
        env=module_environment(),
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_engine_s_light_modules_load_nothing_heavy(tmp_path: Path) -> None:
    loaded = modules_after("import " + ", ".join(LIGHT_ENGINE_MODULES), tmp_path)
    assert "engine" in loaded
    assert not loaded & (HEAVY | {"PySide6"})


def test_the_whole_window_loads_nothing_heavy(tmp_path: Path) -> None:
    names = [module.name for module in pkgutil.walk_packages(app.__path__, "app.")]
    assert {"app.cli", "app.main_window", "app.start"} <= set(names)
    loaded = modules_after("import " + ", ".join(names), tmp_path)
    assert "PySide6" in loaded
    assert not loaded & HEAVY


def test_an_open_window_still_has_nothing_heavy(tmp_path: Path) -> None:
    """Imports inside functions count too: the window is built, shown and closed."""
    code = f"""
import os
os.environ |= {{"QT_QPA_PLATFORM": "offscreen", "HOME": {str(tmp_path)!r}, "XDG_DATA_HOME": {str(tmp_path)!r}}}
from pathlib import Path
from PySide6.QtWidgets import QApplication
from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.theme import Theme
application = QApplication([])
window = MainWindow(EngineBridge(), Theme(application), Path({str(tmp_path)!r}) / "chats.sqlite3")
window.show()
application.processEvents()
window.close()
application.processEvents()
"""
    assert not modules_after(code, tmp_path) & HEAVY


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_the_command_line_itself_needs_neither_qt_nor_torch(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
import contextlib
import app.cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
    app.cli.main({arguments!r})
"""
    loaded = modules_after(code, tmp_path)
    assert not loaded & (HEAVY | {"PySide6", "numpy", "rich"})


def test_the_engine_process_says_hello_before_it_loads_anything_heavy(tmp_path: Path) -> None:
    loaded = modules_after("import engine.process", tmp_path)
    assert not loaded & (HEAVY | {"numpy", "PySide6"})
