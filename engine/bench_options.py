"""The options of ``bench`` and ``compare``: what is run, on what engine, under what load.

A wrong one ends the command with 2 before a model is looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from engine.config import (
    DEVICES,
    DISCIPLINES,
    DTYPES,
    KV_DTYPES,
    MAX_DRAFT_TOKENS,
    ORDERS,
    PREEMPTIONS,
    STATIC_DELIVERIES,
    EngineConfig,
)
from engine.metrics import parse_goodput
from engine.output_files import target_fault
from engine.recording import DEFAULT_LIMIT_BYTES
from engine.workload import (
    BATCHSCOPE,
    Arrivals,
    EngineOptions,
    Scenario,
    UnknownScenarioError,
    Workload,
    WorkloadError,
    list_scenarios,
    load_scenario,
    load_workload,
)

MAX_WARM_UP = 10_000
"""Requests: far more than warms anything up."""


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


def _user_weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in text.split(","):
        user, equals, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not USER=WEIGHT, e.g. ann=2,ben=1")
        if user in weights:
            raise argparse.ArgumentTypeError(f"user {user!r} has two weights")
        weights[user] = weight
    return weights


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--workload",
        metavar="FILE",
        help="a Batchscope jsonl, one request a line, or a trace: ShareGPT, Azure LLM, BurstGPT, Mooncake, vLLM custom",
    )
    what.add_argument("--scenario", metavar="NAME", help=f"{', '.join(list_scenarios())}, or a .toml of yours")
    parser.add_argument(
        "--time-scale", type=float, metavar="X", help="requests of --workload come X times as fast as recorded (1)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows of --workload")


def add_engine_options(parser: argparse.ArgumentParser, *, discipline: bool = True) -> None:
    """The options of :class:`EngineOptions`, under the same names; ``seed`` is among those of the load."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="starter|FOLDER|HUB-ID", help="default: starter")
    if discipline:
        group.add_argument("--discipline", choices=DISCIPLINES)
    group.add_argument("--order", choices=ORDERS)
    group.add_argument("--preemption", choices=PREEMPTIONS)
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests running at once (32)")
    group.add_argument("--token-budget", type=int, metavar="N", help="tokens per step (measured at load)")
    group.add_argument("--chunked-prefill", type=_switch, metavar="on|off")
    group.add_argument("--chunk-size", type=int, metavar="N", help="most tokens of one prompt in a step")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest context in tokens")
    group.add_argument("--watermark", type=float, metavar="X", help="share of the pool that admission leaves free (0)")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per KV block (16)")
    group.add_argument("--kv-blocks", type=int, metavar="N", help="blocks in the pool (from the free memory)")
    group.add_argument("--swap-blocks", type=int, metavar="N", help="blocks of host memory to swap to (as the pool)")
    group.add_argument("--prefix-cache", type=_switch, metavar="on|off")
    group.add_argument("--speculative", metavar="off|ngram|draft:FOLDER", help="who drafts tokens (off)")
    group.add_argument(
        "--draft-tokens", type=int, metavar="K", help=f"most tokens drafted at once, 1 to {MAX_DRAFT_TOKENS} (4)"
    )
    group.add_argument("--ageing", type=float, metavar="S", help="seconds of waiting that outweigh one priority level")
    group.add_argument("--user-weights", type=_user_weights, metavar="a=2,b=1", help="order fair: shares of users (1)")
    group.add_argument("--static-delivery", choices=STATIC_DELIVERIES, help="answers come with their batch or row")
    group.add_argument(
        "--waiting-served-ratio", type=float, metavar="X", help="tgi: waiting join at this share of the running (0.3)"
    )
    group.add_argument(
        "--max-waiting-tokens", type=int, metavar="N", help="tgi: decode steps after which any join (20)"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the weights; auto: int8 on a CPU, bfloat16 on a GPU, int8 where that does not fit",
    )
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="type of keys and values; auto: that of the activations; fp8: a byte, on GPUs that have it",
    )
    group.add_argument("--device", choices=DEVICES, help="auto: the GPU where one works, else the CPU")
    replay, beside = "replay recorded decode steps", "schedule while it computes"
    group.add_argument("--cuda-graphs", type=_switch, metavar="on|off", help=f"{replay} (on; without effect on a CPU)")
    group.add_argument("--overlap", type=_switch, metavar="on|off", help=f"{beside} (on; without effect on a CPU)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (the physical cores)")


def add_load_options(parser: argparse.ArgumentParser, *, warm_up: int = 0) -> argparse._ArgumentGroup:
    """Arrivals and warm-up; returns the group, to which the seed belongs."""
    load = parser.add_argument_group("load")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight at once")
    load.add_argument("--request-rate", type=float, metavar="R", help="requests per second; inf: all at once")
    load.add_argument("--burstiness", type=float, metavar="B", help="shape of the gamma gaps; 1: Poisson")
    load.add_argument("--ramp", metavar="FROM:TO:linear|exponential", help="a request rate that changes over the run")
    load.add_argument(
        "--warmup", type=int, default=warm_up, metavar="N", help=f"requests of its own before, not counted ({warm_up})"
    )
    return load


def add_result_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    result = parser.add_argument_group("result")
    result.add_argument("--goodput", metavar="ttft:MS,tpot:MS,e2el:MS", help="count requests that meet these")
    result.add_argument("--save-outputs", action="store_true", help="add output_token_ids, in order of the workload")
    result.add_argument("--json", metavar="FILE", help="write the result; - is standard output")
    return result


def add_record_options(result: argparse._ArgumentGroup) -> None:
    """The run file of a single run."""
    size = f"{DEFAULT_LIMIT_BYTES // 2**20} MB at most; the oldest steps go first"
    result.add_argument("--record", metavar="RUN", help=f"write every step to a run file ({size})")
    result.add_argument("--record-texts", action="store_true", help="keep prompts and answers in it")


def check_usage(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with 2 where the options make no sense, before anything heavy is loaded."""
    if not args.workload and not args.scenario:
        names = ", ".join(list_scenarios())
        parser.error(f"nothing to run: give --workload FILE (one request a line) or --scenario NAME ({names})")
    if args.scenario and (args.time_scale is not None or args.limit is not None):
        parser.error("--time-scale and --limit go with --workload; a scenario says itself how many come, and when")
    if getattr(args, "find_rate", False):
        _check_search(parser, args)
    record = getattr(args, "record", None)
    if record == "-":
        parser.error("--record -: a run file is not written to standard output; give the path of a file")
    if getattr(args, "record_texts", False) and not record:
        parser.error("--record-texts goes with --record RUN, the file that keeps them")
    for option, target in (("--json", args.json), ("--html", getattr(args, "html", None)), ("--record", record)):
        if fault := target_fault(option, target):
            parser.error(fault)
    if not 0 <= args.warmup <= MAX_WARM_UP:
        parser.error(f"--warmup is {args.warmup}; it must be 0 to {MAX_WARM_UP:,}")


def _check_search(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("ramp", "burstiness", "max_concurrency", "goodput", "save_outputs", "record"):
        if getattr(args, name, None):
            option = "--" + name.replace("_", "-")
            parser.error(
                f"--find-rate does not go with {option}: its probes are open loops of even gaps, at its own rates"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """What a command line asks for."""

    scenario: Scenario | None
    config: EngineConfig
    objectives: dict[str, float] | None
    """Of goodput, in milliseconds."""
    workloads: list[Workload]
    """One for each seed."""


def choose(parser: argparse.ArgumentParser, args: argparse.Namespace, seeds: Sequence[int | None]) -> Chosen:
    """The command line over the scenario over the defaults. Ends with 2 on a bad value; raises :class:`WorkloadError`
    where a file is at fault."""
    try:
        objectives = parse_goodput(args.goodput) if args.goodput else None
        scenario = load_scenario(args.scenario) if args.scenario else None
        said = {name: getattr(args, name, None) for name in EngineOptions.__struct_fields__}
        config = EngineOptions(**said).over(scenario.engine if scenario else EngineOptions()).config()
        workloads = [_workload(args, scenario, seed) for seed in seeds]
        _tell_rows(workloads[0])
        return Chosen(scenario, config, objectives, workloads)
    except UnknownScenarioError as error:
        parser.error(str(error))
    except WorkloadError:
        raise
    except ValueError as error:  # of goodput, of the engine's knobs, of the arrivals
        parser.error(str(error))


def _tell_rows(workload: Workload) -> None:
    """Say on the error output what became of a trace's rows; of our own files every row is taken."""
    rows = workload.rows
    if rows is not None and (rows.rejections or rows.format != BATCHSCOPE):
        clip = "; what is longer than the model's context is clipped" if any(r.clip for r in workload.requests) else ""
        print(f"{workload.name}: {rows.sentence()}{clip}", file=sys.stderr)


def _workload(args: argparse.Namespace, scenario: Scenario | None, seed: int | None) -> Workload:
    """The workload under the arrivals of the command line; ``seed`` replaces the scenario's own."""
    if scenario is not None:
        workload, seed = scenario.build(seed), seed if seed is not None else scenario.seed
    else:
        seed = seed or 0
        scale = 1.0 if args.time_scale is None else args.time_scale
        workload = load_workload(args.workload, seed=seed, time_scale=scale, limit=args.limit)
    said = {
        n: v for n in ("request_rate", "burstiness", "ramp", "max_concurrency") if (v := getattr(args, n)) is not None
    }
    if not said:
        return workload
    if args.request_rate is not None and args.ramp is None:
        said["ramp"] = None
    elif args.ramp is not None and args.request_rate is None:
        said["request_rate"] = None
    merged = {name: getattr(workload.arrivals, name) for name in Arrivals.__struct_fields__} | said
    return workload.with_arrivals(Arrivals(**merged), seed)
