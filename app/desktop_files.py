"""``batchscope desktop``: puts the program into the user's menu of applications, with its icon, or takes it out again.

Into the folders that the XDG specifications name, for this user alone. Exit 0 done, 1 a file could not be written, 2
wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from engine.environment import PACKAGE_ROOT
from engine.output_files import OutputFailure, write_target

DONE, FAILED = 0, 1
NAME = "batchscope"
ASSETS = Path(__file__).parent.parent / "assets"
DESKTOP_FILE = ASSETS / f"{NAME}.desktop"


def run(options: argparse.Namespace) -> int:
    """Do what parsed command-line options say; returns the exit code."""
    data = data_home()
    try:
        for line in install(data) if options.install else remove(data):
            print(line)
    except (OSError, OutputFailure) as error:
        print(f"batchscope desktop: {error}", file=sys.stderr)
        return FAILED
    _tell_desktop(data)
    return DONE


def data_home() -> Path:
    """``$XDG_DATA_HOME``, which counts only where it is absolute, else its default."""
    named = os.environ.get("XDG_DATA_HOME", "")
    return Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "share"


def install(data: Path, command: list[str] | None = None) -> list[str]:
    """Writes all files, also over older ones; what was done, in lines. ``command``: what starts the program; None: as
    it was started now. Raises OSError and :class:`OutputFailure`."""
    words = command or start_command()
    program = words[0].replace("\\", "\\\\")
    text = DESKTOP_FILE.read_text(encoding="utf-8")
    entry = "".join(
        f"Exec={exec_line(words)}\nTryExec={program}\n" if line.startswith("Exec=") else line
        for line in text.splitlines(keepends=True)
    )
    target = _entry(data)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_target("the menu entry", target, entry)
    for source, icon in _icons(data):
        icon.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, icon)
    return [f"Batchscope is in the menu of applications: {target}", "To take it out again: batchscope desktop --remove"]


def remove(data: Path) -> list[str]:
    """Deletes what :func:`install` wrote; what was done, in lines. Raises OSError."""
    was_there = _entry(data).exists()
    for path in (_entry(data), *(icon for _, icon in _icons(data))):
        path.unlink(missing_ok=True)
    return ["Batchscope is out of the menu of applications." if was_there else "Batchscope was not in the menu."]


def start_command() -> list[str]:
    """What starts this very program from anywhere: the command beside this interpreter, else the interpreter."""
    script = Path(sys.executable).parent / NAME
    if script.is_file() and os.access(script, os.X_OK):
        return [str(script)]
    module = [sys.executable, "-P", "-m", "app.cli"]
    if str(PACKAGE_ROOT) in {*site.getsitepackages(), site.getusersitepackages()}:
        return module
    return [shutil.which("env") or "/usr/bin/env", f"PYTHONPATH={PACKAGE_ROOT}", *module]


def exec_line(words: list[str]) -> str:
    """Quoted as the desktop entry specification asks: twice, for strings and for arguments."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    word = word.replace("%", "%%")
    if not any(mark in word for mark in " \t\n\"'\\><~|&;$*?#()`="):
        return word
    for mark in ("\\", '"', "`", "$"):
        word = word.replace(mark, "\\" + mark)
    return '"' + word.replace("\\", "\\\\") + '"'


def _entry(data: Path) -> Path:
    return data / "applications" / f"{NAME}.desktop"


def _icons(data: Path) -> list[tuple[Path, Path]]:
    """Each picture, and where it goes."""
    theme = data / "icons" / "hicolor"
    found = [
        (picture, theme / f"{picture.stem}x{picture.stem}" / "apps" / f"{NAME}.png")
        for picture in sorted((ASSETS / "icons").glob("*.png"))
    ]
    return [*found, (ASSETS / "icon.svg", theme / "scalable" / "apps" / f"{NAME}.svg")]


def _tell_desktop(data: Path) -> None:
    """Desktops that keep an index of the menu bring it up to date; the others look at the folder."""
    program = shutil.which("update-desktop-database")
    if program is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([program, str(data / "applications")], capture_output=True, timeout=20, check=False)
