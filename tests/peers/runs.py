"""One run of one engine: a process of its own, watched from here, whatever comes of it."""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from engine.environment import module_command, module_environment
from tests.peers.cases import Case
from tests.peers.figures import Outcome

DRIVER = Path(__file__).with_name("drivers") / "drive.py"
GRACE_SECONDS = 20.0
"""For a process that is asked to stop and to tell what it completed."""
COMPLETED = ("stop", "length")


class Subject(Protocol):
    """An engine under one setting."""

    @property
    def label(self) -> str: ...

    @property
    def ours(self) -> bool: ...

    def run(self, case: Case, threads: int, timeout: float) -> Outcome:
        """A run in a new process, at most ``timeout`` seconds from its start. Never raises for what the engine does."""
        ...


@dataclass(frozen=True)
class Batchscope:
    """``batchscope bench``. The prefix cache is off, as the peers' are: the prompts are what is measured."""

    dtype: str
    model: Path
    ours: bool = True

    @property
    def label(self) -> str:
        return f"Batchscope {self.dtype}"

    def run(self, case: Case, threads: int, timeout: float) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "--model": self.model,
                "--workload": case.write(Path(folder) / "workload.jsonl"),
                "--dtype": self.dtype,
                "--threads": threads,
                "--max-concurrency": case.max_concurrency,
                "--max-num-seqs": case.max_concurrency,
                "--max-model-len": case.max_model_len,
                "--prefix-cache": "off",
                "--warmup": 1,
                "--json": Path(folder) / "result.json",
            }
            command = module_command("app.cli", "bench", *(str(word) for pair in options.items() for word in pair))
            environment = _without(module_environment(), "OMP_")
            ended = watch(command, environment, timeout, Path(folder), stop=signal.SIGINT)
            result = _read_json(options["--json"])
        return _checked(case, replace(_from_bench(result, ended.began), failure=ended.failure))


@dataclass(frozen=True)
class Peer:
    """An engine of others, in an environment of its own."""

    name: str
    driver: str
    """Module in ``drivers/``."""
    python: str
    """The interpreter of its environment."""
    model: Path
    """GGUF file, or folder with safetensors."""
    precision: str
    ours: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"

    def run(self, case: Case, threads: int, timeout: float) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            job, out = Path(folder) / "job.json", Path(folder) / "out.jsonl"
            content = {
                "model": str(self.model),
                "threads": threads,
                "max_concurrency": case.max_concurrency,
                "max_model_len": case.max_model_len,
                "kv_gb": _kv_gigabytes(self.model, case),
                "warm_up": case.warm_up,
                "rows": list(case.rows),
                "out": str(out),
            }
            job.write_text(json.dumps(content), encoding="utf-8")
            command = [self.python, str(DRIVER), self.driver, str(job)]
            ended = watch(command, self._environment(threads), timeout, Path(folder), stop=signal.SIGKILL)
            told = out.read_text(encoding="utf-8") if out.is_file() else ""
        return _checked(case, replace(_from_driver(told, ended.began), failure=ended.failure))

    def _environment(self, threads: int) -> dict[str, str]:
        """Without what Python and OpenMP were told for us. vLLM gets the allocator and the OpenMP that its manual asks
        for, where they are installed."""
        environment = _without(dict(os.environ), "PYTHON", "OMP_")
        if self.driver == "on_vllm":
            environment["OMP_NUM_THREADS"] = str(threads)
            openmp = Path(self.python).parent.parent / "lib" / "libiomp5.so"
            allocator = ctypes.util.find_library("tcmalloc_minimal")
            found = [*([allocator] if allocator else []), *([str(openmp)] if openmp.is_file() else [])]
            environment["LD_PRELOAD"] = ":".join([*found, *filter(None, [environment.get("LD_PRELOAD")])])
        return environment


def _without(environment: dict[str, str], *prefixes: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


# Processes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    began: float
    """When the process was started, in seconds since the epoch."""
    failure: str
    """Why it did not come to its end, as a sentence; empty where it did."""


def watch(command: Sequence[str], environment: dict[str, str], timeout: float, folder: Path, stop: int) -> Ended:
    """Run ``command`` and wait for it; after ``timeout`` seconds it gets the signal ``stop``, and is killed where that
    does not end it. Nothing that it started outlives it."""
    log = folder / "log"
    began = time.time()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(began, f"{command[0]} cannot be started: {error.strerror}")
        failure = ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            failure = f"timed out after {timeout:g} s"
            process.send_signal(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not failure and process.returncode:
        failure = _last_words(log, process.returncode)
    return Ended(began, failure)


def _last_words(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {lines[-1][:300]}" if lines else how


# Results -------------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def _from_bench(result: dict[str, Any], began: float) -> Outcome:
    if not result:
        return Outcome()
    times = {}
    for i, reason in enumerate(result["finish_reasons"]):
        if reason in COMPLETED:
            at = [result["start_times"][i] + result["ttfts"][i]]
            for gap in result["itls"][i]:
                at.append(at[-1] + gap)
            times[i] = at
    first = result["first_token_at"]
    facts = {key: result[key] for key in ("backend", "backend_reason", "dtype", "threads", "token_budget")}
    return Outcome(times, None if first is None else first - began, result["peak_memory_mb"], facts=facts)


def _from_driver(told: str, began: float) -> Outcome:
    """``told``: the lines of :mod:`tests.peers.drivers.drive`; one cut short by the end of the process is left out."""
    times: dict[int, list[float]] = {}
    start = peak = None
    facts: dict[str, Any] = {}
    for line in told.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if "request" in event:
            times[event["request"]] = event["times"]
        elif "first_token_at" in event:
            start = event["first_token_at"] - began
        elif "peak_memory_mb" in event:
            peak = event["peak_memory_mb"]
        else:
            facts |= event
    return Outcome(times, start, peak, facts=facts)


def _checked(case: Case, outcome: Outcome) -> Outcome:
    """Fails a run in which anything is missing, and says how far a failed one came."""
    failure = outcome.failure
    for i, times in outcome.token_times.items():
        wanted = case.rows[i]["output_tokens"]
        if not failure and len(times) != wanted:
            failure = f"request {i + 1} was given {len(times)} tokens where {wanted} were asked"
    completed = len(outcome.token_times)
    if not failure and completed < len(case.rows):
        failure = "it ended early"
    if failure and completed:
        tokens = sum(map(len, outcome.token_times.values()))
        failure += f"; {completed} of {len(case.rows)} requests had completed, {tokens:,} tokens"
    return replace(outcome, failure=failure)


def _kv_gigabytes(model: Path, case: Case) -> int:
    """Whole GiB that hold the keys and values of a case's requests in flight, in bfloat16; 0 where ``model`` is a file,
    whose engines take what they need."""
    config = _read_json(model / "config.json")
    if not config:
        return 0
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 2 * heads * head_dim * config["num_hidden_layers"]
    return -(-token_bytes * case.max_concurrency * case.max_model_len // 2**30)
