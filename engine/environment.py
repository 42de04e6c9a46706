"""What this interpreter and this machine offer, found out without any heavy import.

The checks of the display look at Qt's platform plugins as files: they load no Qt and start nothing.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import site
import sys
import tomllib
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds the packages ``app``, ``engine`` and ``kernels``."""

QT_LIBRARIES = (
    "libEGL.so.1",
    "libGL.so.1",
    "libX11.so.6",
    "libX11-xcb.so.1",
    "libdbus-1.so.3",
    "libfontconfig.so.1",
    "libfreetype.so.6",
    "libglib-2.0.so.0",
    "libxcb.so.1",
    "libxcb-cursor.so.0",
    "libxcb-icccm.so.4",
    "libxcb-image.so.0",
    "libxcb-keysyms.so.1",
    "libxcb-randr.so.0",
    "libxcb-render.so.0",
    "libxcb-render-util.so.0",
    "libxcb-shape.so.0",
    "libxcb-shm.so.0",
    "libxcb-sync.so.1",
    "libxcb-util.so.1",
    "libxcb-xfixes.so.0",
    "libxcb-xkb.so.1",
    "libxkbcommon.so.0",
    "libxkbcommon-x11.so.0",
)
"""System libraries that Qt and its X11 plugin load and that no Python package brings (from their ELF headers)."""

_DEBIAN_EXCEPTIONS = {"libglib-2.0.so.0": "libglib2.0-0", "libgthread-2.0.so.0": "libglib2.0-0"}


def version() -> str:
    """Batchscope's version, installed or run from its source folder."""
    try:
        return importlib.metadata.version("batchscope")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((PACKAGE_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project["project"]["version"])


def requirements() -> list[str]:
    """What Batchscope asks of the package index, as pip writes it, the extras left out."""
    try:
        listed = importlib.metadata.requires("batchscope") or []
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((PACKAGE_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        listed = list(project["project"]["dependencies"])
    return [requirement for requirement in listed if "extra ==" not in requirement]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules in a fresh interpreter like this one, whatever the working folder holds.

    ``-P`` keeps that folder off the import path: a user's own ``engine/`` there must not be taken for ours.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The environment that goes with :func:`module_command`: it finds our packages where this process found them."""
    environment = dict(os.environ)
    share_cores(environment)
    # An installed package is found without help; site-packages in front would shadow the standard library.
    if str(PACKAGE_ROOT) not in {*site.getsitepackages(), site.getusersitepackages()}:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(PACKAGE_ROOT) + (os.pathsep + before if before else "")
    return environment


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Have OpenMP's threads sleep soon after their work instead of spinning; to be said before torch is imported.

    Between two matrix products they spin for milliseconds by default. Where the cores are not theirs alone (the window
    paints, something compiles) the spinning keeps the very thread off the core that they wait for: ten times slower was
    measured with two threads on two busy cores. What the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Physical cores that this process may use, in a container those of its limit. Two threads on one core only get in
    each other's way in a model's products."""
    import psutil  # only here: the doctor asks this module about packages that may be missing

    logical = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    cores = min(physical, allowed)
    try:
        quota = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
    except OSError:
        quota = []
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores)


# The display ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DisplayState:
    """Whether a window can be shown: yes where both ``absent`` and ``broken`` are empty."""

    absent: str = ""
    """Why there is no display, as the end of a sentence; empty: there is one."""
    broken: str = ""
    """What Qt lacks, as a sentence."""
    fix: str = ""
    """The command that mends it."""


def debian_package(library: str) -> str:
    """The Debian and Ubuntu package of a library, by their naming rule: ``libxcb-cursor.so.0`` → ``libxcb-cursor0``."""
    if library in _DEBIAN_EXCEPTIONS:
        return _DEBIAN_EXCEPTIONS[library]
    stem, _, soversion = library.partition(".so.")
    separator = "-" if stem[-1:].isdigit() else ""
    return f"{stem.lower()}{separator}{soversion}"


def install_command(libraries: Sequence[str]) -> str:
    return "sudo apt install " + " ".join(dict.fromkeys(debian_package(library) for library in libraries))


def library_loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_libraries() -> list[str]:
    """Those system libraries of Qt's that this machine lacks (Linux; elsewhere Qt brings everything)."""
    if not sys.platform.startswith("linux"):
        return []
    return [library for library in QT_LIBRARIES if not library_loads(library)]


def missing_library_of(error: BaseException | str) -> str | None:
    """The library that a loader's message says it cannot find: ``libEGL.so.1: cannot open shared object file …``."""
    match = re.search(r"(lib[\w.+-]+?\.so(?:\.\d+)*): cannot open shared object file", str(error))
    return match.group(1) if match else None


def display_state() -> DisplayState:
    """Look before Qt does: where Qt finds its display or its plugin unusable it aborts the process."""
    if not sys.platform.startswith("linux"):
        return DisplayState()
    wayland, x11 = os.environ.get("WAYLAND_DISPLAY"), os.environ.get("DISPLAY")
    asked = os.environ.get("QT_QPA_PLATFORM", "").split(":")[0].split(";")[0]
    if asked not in ("", "xcb", "wayland", "wayland-egl", "offscreen", "minimal"):
        return DisplayState()  # eglfs, vnc and their like need neither
    if not wayland and not x11:
        return DisplayState(absent="neither DISPLAY nor WAYLAND_DISPLAY is set")
    if asked in ("offscreen", "minimal") or (wayland and asked != "xcb" and _plugin_error("libqwayland.so") is None):
        return DisplayState()
    error = _plugin_error("libqxcb.so" if x11 else "libqwayland.so")
    if error is not None:
        return _broken(error)
    if not _x_server_answers():
        return DisplayState(absent=f"DISPLAY is {x11!r}, but no X server answers there")
    return DisplayState()


def _broken(error: str) -> DisplayState:
    missing = missing_libraries()
    named = missing_library_of(error)
    if named and named not in missing:
        missing.append(named)
    if not missing:
        return DisplayState(broken=f"Qt's platform plugin does not load: {error}")
    return DisplayState(
        broken=f"Qt cannot open a window here: {', '.join(missing)} missing", fix=install_command(missing)
    )


def _plugin_error(file_name: str) -> str | None:
    """Why the dynamic loader refuses one of Qt's platform plugins; None: it takes it."""
    spec = importlib.util.find_spec("PySide6")
    if spec is None or not spec.submodule_search_locations:
        return "PySide6 is not installed"
    for location in spec.submodule_search_locations:
        plugin = Path(location) / "Qt" / "plugins" / "platforms" / file_name
        if plugin.is_file():
            try:
                ctypes.CDLL(str(plugin))
            except OSError as error:
                return str(error)
            return None
    return f"{file_name} is not among PySide6's plugins"


def _x_server_answers() -> bool:
    xcb = ctypes.CDLL("libxcb.so.1")
    xcb.xcb_connect.restype = ctypes.c_void_p
    xcb.xcb_connection_has_error.argtypes = [ctypes.c_void_p]
    xcb.xcb_disconnect.argtypes = [ctypes.c_void_p]
    connection = xcb.xcb_connect(None, None)
    try:
        return not xcb.xcb_connection_has_error(connection)
    finally:
        xcb.xcb_disconnect(connection)
