"""What a comparison shows, in sentences with its numbers. Light."""

from __future__ import annotations

from engine.comparison import FIGURES, Figure, Result, efficiency_of, median_of, spread_of, variants_of, waste_of

_FIGURE = {figure.key: figure for figure in FIGURES}
_NOTABLE = 1.05
"""Ratios nearer to 1 are not worth a sentence."""


def times(number: int) -> str:
    """How often something happened: ``once``, ``12 times``."""
    return "once" if number == 1 else f"{number:,} times"


def shortcomings(result: Result) -> list[str]:
    """What keeps a result from being whole, a sentence each."""
    told = ["Interrupted: only the runs that were complete are shown."] if result["interrupted"] else []
    told += [f"{name} could not run: {reason.rstrip('.')}." for name, reason in result["failures"].items()]
    several = len({run["seed"] for run in result["runs"]}) > 1
    for run in result["runs"]:
        if not run.get("failed"):
            continue
        reasons = list(dict.fromkeys(error for error in run.get("errors") or () if error))
        because = f": {'; '.join(reasons[:2])}" if reasons else ""
        seed = f", seed {run['seed']}" if several and run["seed"] is not None else ""
        of = f"{run['failed']:,} of {run['num_prompts']:,} request{'' if run['num_prompts'] == 1 else 's'}"
        told.append(f"{run['variant']}{seed}: {of} failed{because.rstrip('.')}.")
    return told


def observations(result: Result) -> list[str]:
    """The most telling first; none where nothing differs."""
    return [sentence for make in _MAKERS for sentence in make(result)]


def _best_and_worst(result: Result, key: str) -> tuple[Figure, str, float, str, float] | None:
    """A figure, the best variant by it and the worst; None where they hardly differ."""
    figure = _FIGURE[key]
    values = {n: v for n in variants_of(result) if (v := median_of(result["runs"], n, key)) is not None and v > 0}
    if len(values) < 2:
        return None
    ordered = sorted(values, key=values.__getitem__, reverse=bool(figure.higher_is_better))
    best, worst = ordered[0], ordered[-1]
    ratio = max(values[best], values[worst]) / min(values[best], values[worst])
    return None if ratio < _NOTABLE else (figure, best, values[best], worst, values[worst])


def _speed(result: Result) -> list[str]:
    found = _best_and_worst(result, "duration")
    if found is None:
        return []
    figure, best, least, worst, most = found
    return [
        f"{best} is through with the work in {figure.text(least)}, {worst} takes {figure.text(most)}: "
        f"{most / least:.2f} times as long."
    ]


def _latencies(result: Result) -> list[str]:
    told = []
    for key, what in (("mean_ttft_ms", "waits for a first token"), ("p99_itl_ms", "gap between two tokens at P99")):
        found = _best_and_worst(result, key)
        if found is None:
            continue
        figure, best, least, worst, most = found
        if key == "mean_ttft_ms":
            told.append(
                f"A request {what} {figure.text(least)} on average under {best} and {figure.text(most)} under {worst}."
            )
        else:
            told.append(f"The {what} is {figure.text(least)} under {best} and {figure.text(most)} under {worst}.")
    return told


def _goodput(result: Result) -> list[str]:
    objectives = result["runs"][0]["goodput_objectives_ms"]
    if not objectives:
        return []
    limits = ", ".join(f"{name.upper()} within {limit:,g} ms" for name, limit in objectives.items())
    figure = _FIGURE["request_goodput"]
    parts = [f"{n} {figure.text(median_of(result['runs'], n, figure.key))}" for n in variants_of(result)]
    return [f"Requests per second that meet {limits}: {', '.join(parts)}."]


def _padding(result: Result) -> list[str]:
    told = []
    for name in variants_of(result):
        tokens, seconds = waste_of(result, name, "padding")
        computed = median_of(result["runs"], name, "computed_tokens") or 0
        if not tokens:
            continue
        share = tokens / (tokens + computed)
        time = f" and took {seconds:,.2f} s" if seconds else ""
        told.append(
            f"Of the tokens that {name} computed, {tokens:,.0f} were padding ({share:.0%}){time}: the crossed "
            "stretches of its lanes."
        )
    for name in variants_of(result):
        shares = efficiency_of(result, name)
        if shares is not None and shares["eta"] is not None:
            useful, predicted = shares["measured_useful"], shares["predicted_useful"]
            measured = (
                ""
                if useful is None or predicted is None
                else (
                    f"; useful work was predicted at {predicted:.1%} and measured at {useful:.1%} of what was computed"
                )
            )
            told.append(f"The batches of {name} have η {shares['eta']:.1%}{measured}.")
    return told


def _preemptions(result: Result) -> list[str]:
    told = []
    for name in variants_of(result):
        count = median_of(result["runs"], name, "preemptions")
        again = median_of(result["runs"], name, "recomputed_tokens") or 0
        moved = median_of(result["runs"], name, "swapped_blocks") or 0
        if not count:
            continue
        cost = [f"{again:,.0f} tokens were computed again"] if again else []
        cost += [f"{moved:,.0f} blocks moved to the host"] if moved else []
        often = times(round(count))
        told.append(f"{name} preempted {often}{': ' if cost else ''}{' and '.join(cost)}.")
    return told


def _caches(result: Result) -> list[str]:
    told = []
    for name in variants_of(result):
        hits = median_of(result["runs"], name, "prefix_hit_tokens")
        asked = median_of(result["runs"], name, "prefix_query_tokens")
        if hits and asked:
            told.append(f"{name} found {hits:,.0f} of {asked:,.0f} prompt tokens in the prefix cache.")
        rate = median_of(result["runs"], name, "acceptance_rate")
        drafted = median_of(result["runs"], name, "draft_tokens")
        if rate is not None and drafted:
            told.append(f"{name} drafted {drafted:,.0f} tokens, of which {rate:.0%} were accepted.")
    return told


def _answers(result: Result) -> list[str]:
    return [
        f"{found['different']:,} answers of {name} differ from those of {result['baseline']}, and not by a near tie."
        for name, found in result["same_ids"].items()
        if found["different"]
    ]


def _trust(result: Result) -> list[str]:
    names = variants_of(result)
    if len({run["seed"] for run in result["runs"]}) < 2:
        return ["One seed was run, so nothing is said of chance: differences of a few percent may be it."]
    spreads = {n: s for n in names if (s := spread_of(result["runs"], n, "request_throughput")) and s.median > 0}
    if not spreads:
        return []
    widest = max(spreads, key=lambda n: (spreads[n].most - spreads[n].least) / spreads[n].median)
    spread = spreads[widest]
    return [
        f"Over {spread.seeds} seeds the requests per second of {widest} spread from {spread.least:.2f} to "
        f"{spread.most:.2f}, the widest of all."
    ]


_MAKERS = (_speed, _latencies, _goodput, _padding, _preemptions, _caches, _answers, _trust)
