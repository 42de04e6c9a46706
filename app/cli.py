"""The command line: ``batchscope`` opens the window, its commands do the rest.

Commands that need torch run in an interpreter of their own and take over this process, arguments untouched: neither
this module nor the window ever imports it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from engine.config import DEVICES, DTYPES, KV_DTYPES, CacheConfig, ConfigError, EngineConfig
from engine.environment import (
    DisplayState,
    display_state,
    install_command,
    missing_libraries,
    missing_library_of,
    module_command,
    module_environment,
    version,
)

DONE, FAILED, WRONG_USAGE = 0, 1, 2

MODULES = {
    "bench": ("engine.bench", "run a workload without a window and print its latencies and throughput"),
    "compare": ("engine.compare", "run the same workload through several disciplines and show them side by side"),
    "export": ("engine.export", "write a recorded run as a Perfetto trace or as tables"),
    "kernels": ("kernels", "compile every kernel for named GPUs and check it against its reference"),
    "doctor": ("engine.doctor", "show device, versions and caches, and what is missing with the command that mends it"),
}
"""Commands that are modules of their own: the module and what it does. They parse their own arguments."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Wrong usage shows all there is, then what was wrong: the reader's eye rests at the end."""
        self.print_help(sys.stderr)
        self.exit(WRONG_USAGE, f"\n{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="batchscope",
        description="A continuous-batching language-model engine with a window on every scheduling decision. "
        "Without a command it opens the window.",
    )
    parser.add_argument("--version", action="version", version=f"batchscope {version()}")
    window = parser.add_argument_group("the window's engine")
    window.add_argument(
        "--model", default=None, metavar="MODEL", help="'starter', a folder with a checkpoint, or a Hugging Face id"
    )
    window.add_argument("--dtype", choices=DTYPES, default=None, help="type of the weights")
    window.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default=None, help="type of keys and values; fp8: a byte, on GPUs that have it"
    )
    window.add_argument(
        "--device", choices=DEVICES, default=None, help="where the model runs; auto: on the GPU where one works"
    )
    window.add_argument("--threads", type=int, default=None, metavar="N", help="CPU threads; default: physical cores")
    window.add_argument("--max-model-len", type=int, default=None, metavar="N", help="longest context in tokens")
    window.add_argument("--kv-blocks", type=int, default=None, metavar="N", help="size of the KV pool in blocks")

    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    demo = commands.add_parser(
        "demo", help="the window drives itself through a scenario, then quits", description=_demo_description()
    )
    demo.add_argument("--offscreen", action="store_true", help="render the same window without a display")
    demo.add_argument("--scenario", default=None, metavar="NAME", help="a built-in scenario, or a .toml of yours")
    demo.add_argument("--seconds", type=_seconds, default=20.0, metavar="S", help="how long, 1 to 3600 (default 20)")
    demo.add_argument("--screenshot", type=Path, default=None, metavar="PNG", help="where to save a picture")
    demo.add_argument("--json", default=None, metavar="FILE", help="where to write the result; '-' is standard output")
    replay = commands.add_parser(
        "replay", help="the window on a recorded run, without a model", description="The window on a recorded run."
    )
    replay.add_argument("run", type=Path, metavar="RUN", help="a file written by bench --record or saved by the window")
    replay.add_argument("--offscreen", action="store_true", help="render the window without a display, then quit")
    replay.add_argument("--step", type=int, default=None, metavar="N", help="which step to show (the last)")
    replay.add_argument("--screenshot", type=Path, default=None, metavar="PNG", help="where to save a picture")
    desktop = commands.add_parser(
        "desktop",
        help="put Batchscope into your menu of applications, or take it out",
        description="Puts Batchscope into your menu of applications, with its icon, or takes it out again.",
    )
    what = desktop.add_mutually_exclusive_group(required=True)
    what.add_argument("--install", action="store_true", help="write the menu entry and the icons")
    what.add_argument("--remove", action="store_true", help="delete them")
    for name, (_, about) in MODULES.items():
        commands.add_parser(name, help=about, add_help=False)
    return parser


def _demo_description() -> str:
    return "The real window loads the starter model, runs a built-in scenario, prints a summary and quits."


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not within 1 to 3600 seconds")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in MODULES:
        return run_module(MODULES[arguments[0]][0], arguments[1:])
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if options.command in MODULES:
        parser.error(f"{options.command} takes its options after its name")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if options.command == "demo":
            return demo(options)
        if options.command == "replay":
            return replay(options)
        if options.command == "desktop":
            from app.desktop_files import run

            return run(options)
        return window(options, lambda: parser.parse_args([*arguments, "demo", "--offscreen"]))
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ImportError as error:
        return _explain_import_error(error)


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Become another of our modules: same terminal, same signals, its exit code."""
    if sys.stdout is None:
        _say("standard output is closed: redirect it to a file, or to /dev/null")
        return FAILED
    command, environment = module_command(module, *arguments), module_environment()
    if sys.platform == "win32":
        return subprocess.call(command, env=environment)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(command[0], command, environment)


def demo(options: argparse.Namespace) -> int:
    if (code := _choose_display(options)) is not None:
        return code
    from app.demo import run_demo

    return int(run_demo(options) or DONE)


def replay(options: argparse.Namespace) -> int:
    if (code := _choose_display(options)) is not None:
        return code
    from app.replay import run_replay

    return run_replay(options)


def _choose_display(options: argparse.Namespace) -> int | None:
    """Offscreen where there is no display; the exit code where there is one that cannot be used."""
    if not options.offscreen:
        state = display_state()
        if state.absent:
            _say(f"no display ({state.absent}): {options.command} runs offscreen")
            options.offscreen = True
        elif state.broken:
            return _explain_broken_display(state)
    return None


def window(options: argparse.Namespace, demo_options: Callable[[], argparse.Namespace]) -> int:
    """The window; where there is no display the offscreen demo instead, with the same engine."""
    engine_config(options, EngineConfig())  # what makes no sense is said before anything opens
    state = display_state()
    if state.broken:
        return _explain_broken_display(state)
    if state.absent:
        _say(f"no display ({state.absent}): running `batchscope demo --offscreen` instead of opening the window")
        return demo(demo_options())
    from app.start import run_window

    return run_window(lambda base: engine_config(options, base), model=options.model)


def engine_config(options: argparse.Namespace, base: EngineConfig) -> EngineConfig:
    """What the window starts its engine with: ``base``, but for what the command line says. Raises
    :class:`ConfigError`."""
    names = ("model", "dtype", "kv_dtype", "device", "threads", "max_model_len")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(base, cache=CacheConfig(num_blocks=options.kv_blocks), **given)


def _explain_broken_display(state: DisplayState) -> int:
    _say(state.broken + (f"\n  to mend it: {state.fix}" if state.fix else ""))
    _say("  without a display it still runs: batchscope demo --offscreen")
    return FAILED


def _explain_import_error(error: ImportError) -> int:
    """Qt's own libraries miss one of the system's, or a package is not installed."""
    library = missing_library_of(error)
    if library is not None:
        missing = sorted({library, *missing_libraries()})
        _say(f"Qt needs {', '.join(missing)}, which this system lacks\n  to mend it: {install_command(missing)}")
        return FAILED
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(("app", "engine")):
        _say(f"the package {error.name} is not installed\n  to mend it: {sys.executable} -m pip install batchscope")
        return FAILED
    raise error


def _say(text: str) -> None:
    print(text if text.startswith(" ") else f"batchscope: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
