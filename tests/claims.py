"""The claims of the literature on continuous batching, each measured here by name: ``python -m tests.claims NAME…``

::

    python -m tests.claims                                  the names and the claims
    python -m tests.claims conversation --dtype float32     one of them; options of ``batchscope compare`` go through
    python -m tests.claims --all --json claims.json

Every figure comes from the functions behind ``batchscope compare``. Scenarios stay as they are; what a claim changes of
the engine beside them is listed under ``options``. A target is met or it is not: nothing is tuned until it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from engine.bench import BenchFailure, load
from engine.bench_options import Chosen, choose
from engine.bench_report import Progress
from engine.compare import Terminal, build_parser, plan_of
from engine.comparing import Comparison, run_fresh
from engine.config import EngineConfig
from engine.loader import LoadedEngine
from engine.output_files import target_fault, write_target
from engine.variants import product

Figures = dict[str, Any]


class Bench:
    """A scenario and the model it runs on, loaded once."""

    def __init__(self, scenario: str, extra: Sequence[str], progress: Progress, *options: str) -> None:
        self.options = list(options)
        self._parser = build_parser()
        self._argv = ["--scenario", scenario, *options, *extra]
        self._progress = progress
        self.chosen = self.choose()
        self.loaded: LoadedEngine = load(self.chosen.config, progress)

    def choose(self, *more: str) -> Chosen:
        """What the scenario and the options ask for, with ``more`` options of the load."""
        return choose(self._parser, self._parser.parse_args([*self._argv, *more]), [None])

    def compare(self, disciplines: Sequence[str], *more: str) -> Figures:
        """The result of ``batchscope compare``."""
        chosen = self.choose(*more)
        variants = product(disciplines, [])
        plan = plan_of(self._parser.parse_args([*self._argv, *more]), variants, [None], chosen)
        made = Comparison(self.loaded, chosen.config, plan, Terminal(self._progress, len(variants)))
        made.run()
        return made.result(interrupted=False)

    def run(self, label: str, **scheduler: Any) -> Figures:
        """One run under changed knobs of the scheduler."""
        self._progress.label = label
        config: EngineConfig = self.chosen.config
        config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **scheduler))
        workload = self.chosen.workloads[0]
        return run_fresh(self.loaded, workload, config, warm_up=1, progress=self._progress)


def _run_of(result: Figures, discipline: str) -> Figures:
    return next(run for run in result["runs"] if run["discipline"] == discipline)


def _both(result: Figures, *keys: str) -> Figures:
    """Figures of all disciplines side by side."""
    return {key: {run["discipline"]: run[key] for run in result["runs"]} for key in keys}


# The claims ----------------------------------------------------------------------------------------------------------


def conversation(extra: Sequence[str], progress: Progress) -> Figures:
    """Continuous batching serves 2.4 times the requests per second of static; utilisation 30 % → 70 %; TTFT falls."""
    bench = Bench("conversation", extra, progress)
    result = bench.compare(["static", "vllm"])
    ratios = result["ratios"]["vllm"]
    utilisation = _both(result, "slot_utilisation", "slot_utilisation_run")
    return {
        "options": bench.options,
        "throughput_ratio": ratios["request_throughput"],
        "steps_ratio": ratios["steps"],
        "mean_ttft_ratio": ratios["mean_ttft_ms"],
        "mean_e2el_ratio": ratios["mean_e2el_ms"],
        **utilisation,
        **_both(result, "request_throughput", "output_throughput", "steps", "duration", "mean_ttft_ms"),
        "static_totals": _run_of(result, "static")["static_totals"],
        "same_ids": result["same_ids"],
        "targets": {
            "throughput_ratio ≥ 2.4": ratios["request_throughput"] >= 2.4,
            "slot_utilisation of vllm ≥ 0.95": utilisation["slot_utilisation"]["vllm"] >= 0.95,
        },
    }


def open_loop(extra: Sequence[str], progress: Progress) -> Figures:
    """Mean latency 2.5 s → 0.8 s, P99 8 s → 2 s, at 70, 90 and 100 % of the rate where static saturates."""
    bench = Bench("short-answers", extra, progress)
    saturated = bench.compare(["static"], "--request-rate", "inf")["runs"][0]
    capacity = saturated["request_throughput"]
    curve = []
    for share in (0.7, 0.9, 1.0):
        result = bench.compare(["static", "vllm"], "--request-rate", repr(share * capacity))
        ratios = result["ratios"]["vllm"]
        curve.append(
            {
                "share": share,
                "request_rate": share * capacity,
                "mean_e2el_ratio": ratios["mean_e2el_ms"],
                "p99_e2el_ratio": ratios["p99_e2el_ms"],
                **_both(result, "mean_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "request_throughput"),
            }
        )
    at_90 = curve[1]
    return {
        "options": bench.options,
        "requests": saturated["num_prompts"],
        "static_saturates_at": capacity,
        "curve": curve,
        "targets": {
            "at 90 %: mean E2EL ≤ 0.32×": at_90["mean_e2el_ratio"] <= 0.32,
            "at 90 %: P99 E2EL ≤ 0.25×": at_90["p99_e2el_ratio"] <= 0.25,
        },
    }


def spread(extra: Sequence[str], progress: Progress) -> Figures:
    """Static batching wastes more than 80 % when lengths vary from 20 to 2,048."""
    bench = Bench("spread", extra, progress)
    result = bench.compare(["static", "vllm"])
    totals = _run_of(result, "static")["static_totals"]
    wasted = 1 - totals["measured_useful"]
    gap = abs(totals["measured_useful"] - totals["predicted_useful"])
    return {
        "options": bench.options,
        **totals,
        "throughput_ratio": result["ratios"]["vllm"]["request_throughput"],
        **_both(result, "duration", "waste"),
        "targets": {"more than 80 % wasted": wasted > 0.8, "predicted and measured within 1 point": gap < 0.01},
    }


def batch_curve(extra: Sequence[str], progress: Progress) -> Figures:
    """A batch of 32 gives 16 times the throughput of one request at a time."""
    bench = Bench("batch-curve", extra, progress)
    curve: list[Figures] = []
    for size in (1, 2, 4, 8, 16, 32):
        run = bench.run(f"batches of {size}", max_num_seqs=size)
        step_ms = run["duration"] / run["steps"] * 1e3
        curve.append(
            {
                "max_num_seqs": size,
                "output_throughput": run["output_throughput"],
                "step_ms": step_ms,
                "step_ms_per_row": step_ms / run["running_mean"],
            }
        )
    for point in curve:
        point["times_one"] = point["output_throughput"] / curve[0]["output_throughput"]
    return {
        "options": bench.options,
        "curve": curve,
        "targets": {"32 gives at least 16 times one": curve[-1]["times_one"] >= 16},
    }


def long_prompt(extra: Sequence[str], progress: Progress) -> Figures:
    """Chunked prefill keeps decoding smooth."""
    bench = Bench("long-prompt", extra, progress)
    longest = max(request.prompt_tokens or 0 for request in bench.chosen.workloads[0].requests)
    whole = bench.run("whole prompts", chunked_prefill=False, max_num_batched_tokens=longest + 64)
    chunked = bench.run("in chunks")
    sides = {"chunked": chunked, "whole": whole}
    p99 = {name: run["by_user"]["decoding"]["p99_itl_ms"] for name, run in sides.items()}
    return {
        "options": bench.options,
        "p99_itl_ms_of_decoding": p99,
        "p99_itl_ratio": p99["chunked"] / p99["whole"],
        "longest_gap_ms": {name: max(max(gaps, default=0) for gaps in r["itls"]) * 1e3 for name, r in sides.items()},
        "mean_ttft_ms_of_long": {name: run["by_user"]["long"]["mean_ttft_ms"] for name, run in sides.items()},
        "token_budget": {name: run["token_budget"] for name, run in sides.items()},
        "targets": {"P99 ITL of running decodes falls": p99["chunked"] < p99["whole"]},
    }


def rush_hour(extra: Sequence[str], progress: Progress) -> Figures:
    """Time to first token falls."""
    bench = Bench("rush-hour", extra, progress)
    result = bench.compare(["static", "vllm"])
    ratio = result["ratios"]["vllm"]["mean_ttft_ms"]
    return {
        "options": bench.options,
        "mean_ttft_ratio": ratio,
        **_both(result, "mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms"),
        "targets": {"mean TTFT falls": ratio < 1},
    }


def reservation(extra: Sequence[str], progress: Progress) -> Figures:
    """Without paging, memory is reserved for what was asked, and fewer requests run at once."""
    # 8,192 tokens: a fifth of what 32 of these requests may grow to, and four times the largest of them.
    bench = Bench("conversation", extra, progress, "--kv-blocks", "512")
    result = bench.compare(["orca", "vllm"])
    running = _both(result, "running_peak", "running_mean")
    return {
        "options": bench.options,
        **running,
        **_both(result, "request_throughput", "preemptions", "kv_blocks_total"),
        "reserved": {run["discipline"]: run["waste"]["reserved"] for run in result["runs"]},
        "running_mean_ratio": result["ratios"]["vllm"]["running_mean"],
        "throughput_ratio": result["ratios"]["vllm"]["request_throughput"],
        "targets": {"more run at once": running["running_mean"]["vllm"] > running["running_mean"]["orca"]},
    }


CLAIMS: dict[str, Callable[[Sequence[str], Progress], Figures]] = {
    "conversation": conversation,
    "open-loop": open_loop,
    "spread": spread,
    "batch-curve": batch_curve,
    "long-prompt": long_prompt,
    "rush-hour": rush_hour,
    "reservation": reservation,
}


# The command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.claims", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLAIMS))
    parser.add_argument("--all", action="store_true", help="every claim; takes a quarter of an hour and more")
    parser.add_argument("--json", metavar="FILE", help="write the figures of all claims here as well")
    args, extra = parser.parse_known_args(argv)
    names = list(CLAIMS) if args.all else args.names
    for name in names:
        if name not in CLAIMS:
            parser.error(f"no claim is called {name!r}; they are {', '.join(CLAIMS)}")
    if fault := target_fault("--json", args.json):
        parser.error(fault)
    if not names:
        for name, claim in CLAIMS.items():
            print(f"{name:14} {claim.__doc__}")
        return 0
    figures: Figures = {}
    for name in names:
        try:
            with Progress() as progress:
                figures[name] = {"claim": CLAIMS[name].__doc__, **CLAIMS[name](extra, progress)}
        except BenchFailure as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(json.dumps({name: figures[name]}, indent=2, ensure_ascii=False), flush=True)
        if args.json:
            write_target("--json", args.json, json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
