"""Batchscope beside other engines on this machine: ``python -m tests.beside_peers --workload FILE …``.

::

    python -m tests.beside_peers --workload w64.jsonl --workload s1.jsonl --ttft-prompt 1024 --rounds 3 \\
        --llamacpp ~/llamacpp/bin/python --openvino ~/openvino/bin/python --vllm ~/vllm/bin/python --json beside.json

Each peer is optional: an environment of the user's with ``xllamacpp``, with ``openvino-genai`` and ``numpy``, or with
vLLM for CPUs, named by its interpreter. Every run is a new process with the same token ids, threads, length of context
and number of requests at once, without a prefix cache and after one warm-up request. Round by round the engines take
turns, ours first; the table has medians over the rounds and ours divided by the best peer's. A figure's definition is
in :mod:`tests.peers.figures`. What a run gave is printed, and written to ``--json``, as soon as it is there; an engine
whose first run in a case fails is not run again in it. Exit 1 where a run of ours failed.

vLLM reads the folder of ``--model``, as we do, and computes in bfloat16; the other two read the files of ``--gguf``.
``python -m tests.peers.requantise`` makes a file in Q8_0 of the starter's, which is in Q4_1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding
from rich.console import Console

from engine.bench_report import Progress
from engine.config import DTYPES
from engine.environment import module_environment, usable_cores
from engine.models.errors import ModelLoadError
from engine.models.starter import ensure_starter
from engine.output_files import target_fault, write_target
from engine.workload import WorkloadError
from tests.peers.cases import Case, CaseMaker, starter_gguf
from tests.peers.report import Report, short
from tests.peers.runs import Batchscope, Peer, Subject

GGUF_PEERS = {"llamacpp": "llama.cpp", "openvino": "OpenVINO"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.beside_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", default=[], metavar="FILE", help="may be given again")
    parser.add_argument("--ttft-prompt", type=int, metavar="N", help="also: TTFT of a prompt of N tokens, alone")
    parser.add_argument("--ttft-repeats", type=int, default=5, metavar="N", help="prompts of it in a run (5)")
    parser.add_argument("--window", action="store_true", help="also: what the open window costs, by tests.window_cost")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--dtypes", default="int8,bfloat16", metavar="D,D", help="of ours (int8,bfloat16)")
    parser.add_argument("--threads", type=int, default=usable_cores(), metavar="N", help="of every engine")
    parser.add_argument("--max-concurrency", type=int, default=32, metavar="N", help="most requests at once (32)")
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="S", help="of one run, start included (1200)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="config.json and safetensors (the starter model)")
    parser.add_argument(
        "--gguf", type=Path, action="append", metavar="FILE", help="may be given again (the starter model's own)"
    )
    for name in (*GGUF_PEERS, "vllm"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="the interpreter that can import it")
    parser.add_argument("--json", metavar="FILE", help="write all figures here as well, after every run")
    return parser


def check_usage(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with 2 on wrong usage, before anything is run."""
    if not args.workload and args.ttft_prompt is None and not args.window:
        parser.error("nothing to run: give --workload FILE, --ttft-prompt N or --window")
    for name in ("ttft_prompt", "ttft_repeats", "rounds", "threads", "max_concurrency", "timeout"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    for dtype in args.dtypes.split(","):
        if dtype not in DTYPES:
            parser.error(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    for file in args.gguf or ():
        if not file.is_file():
            parser.error(f"--gguf {file}: there is no such file")
    words = [quantisation(file) for file in args.gguf or ()]
    if len(set(words)) < len(words):
        parser.error(f"--gguf: the last words of the files' names must differ; they are {', '.join(words)}")
    if fault := target_fault("--json", args.json):
        parser.error(fault)


def cases_of(args: argparse.Namespace, model: Path) -> list[Case]:
    """Raises :class:`WorkloadError`."""
    maker = CaseMaker(model)
    cases = [maker.from_file(path, args.max_concurrency) for path in args.workload]
    if args.ttft_prompt:
        cases.append(maker.prompt_alone(args.ttft_prompt, args.ttft_repeats))
    return cases


def subjects_of(args: argparse.Namespace, model: Path, progress: Progress) -> list[Subject]:
    """Ours, then the peers that were named. Raises ``ModelLoadError`` where the starter's GGUF cannot be had."""
    subjects: list[Subject] = [Batchscope(dtype, model) for dtype in args.dtypes.split(",")]
    pythons = {name: python for name in GGUF_PEERS if (python := getattr(args, name))}
    files = [file.absolute() for file in args.gguf or ([starter_gguf(progress.loading)] if pythons else [])]
    subjects += [
        Peer(GGUF_PEERS[name], f"on_{name}", python, file, quantisation(file))
        for name, python in pythons.items()
        for file in files
    ]
    if args.vllm:
        subjects.append(Peer("vLLM", "on_vllm", args.vllm, model, "bfloat16"))
    return subjects


def quantisation(file: Path) -> str:
    """The last word of a GGUF file's name: ``Model-135M.Q4_1.gguf`` → ``Q4_1``."""
    return re.split("[.-]", file.stem)[-1]


class Bench:
    """The rounds, and what there is of them so far."""

    def __init__(self, args: argparse.Namespace, cases: Sequence[Case], subjects: Sequence[Subject]) -> None:
        self._args, self._cases, self._subjects = args, cases, subjects
        self.report = Report(cases, subjects)
        self.window: list[dict[str, Any]] = []

    def run(self) -> None:
        for number in range(1, self._args.rounds + 1):
            for case in self._cases:
                for subject in self._subjects:
                    if number > 1 and not self.report.row(case, subject).rounds:
                        continue
                    outcome = subject.run(case, self._args.threads, self._args.timeout)
                    self.report.add(case, subject, outcome)
                    print(f"round {number}, {case.name}, {subject.label}: {short(case, outcome)}", flush=True)
                    self._keep()
        if self._args.window:
            for dtype in self._args.dtypes.split(","):
                self.window.append(window_cost(self._args, dtype))
                self._keep()

    def _keep(self) -> None:
        if self._args.json:
            content = {
                "cpu": llvmlite.binding.get_host_cpu_name(),
                "threads": self._args.threads,
                "cases": self.report.as_json(),
                "window": self.window,
            }
            write_target("--json", self._args.json, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def print(self, console: Console) -> None:
        self.report.print(console)
        for cost in self.window:
            told = cost.get("failure") or f"{cost['median_ratio']:.2f}× the output tok/s of the same load without it"
            console.print(f"Batchscope {cost['dtype']}, window open: {told}", markup=False)


def window_cost(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The result of :mod:`tests.window_cost` for one of our types, or why there is none."""
    command = [sys.executable, "-m", "tests.window_cost", "--rounds", str(args.rounds), "--dtype", dtype]
    command += ["--threads", str(args.threads), "--batch", str(args.max_concurrency), "--json"]
    try:
        done = subprocess.run(
            command, env=module_environment(), capture_output=True, text=True, timeout=args.rounds * args.timeout
        )
        return {"dtype": dtype, **json.loads(done.stdout)}
    except subprocess.TimeoutExpired as error:
        return {"dtype": dtype, "failure": f"timed out after {error.timeout:g} s"}
    except ValueError:
        words = done.stderr.strip().splitlines()
        return {"dtype": dtype, "failure": words[-1] if words else f"exit code {done.returncode}"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_usage(parser, args)
    try:
        with Progress() as progress:
            model = args.model.absolute() if args.model else ensure_starter(progress.loading)
            bench = Bench(args, cases_of(args, model), subjects_of(args, model, progress))
    except (WorkloadError, ModelLoadError, OSError) as error:
        print(f"beside_peers: {error}", file=sys.stderr)
        return 1
    interrupted = False
    try:
        bench.run()
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; this is what there is", file=sys.stderr)
    bench.print(Console(width=200))
    return 1 if interrupted or bench.report.ours_failed else 0


if __name__ == "__main__":
    sys.exit(main())
