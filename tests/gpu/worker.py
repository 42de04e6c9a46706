"""The side that knows torch: does the items of a job and writes what they give, as :mod:`tests.gpu.lane` says."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from tests.gpu.figures import Figure, Report
from tests.gpu.lane import BROKEN, NO_GPU
from tests.gpu.stand_in import install_where_missing


def main(job: dict[str, Any], descriptor: int) -> int:
    os.environ["TRITON_INTERPRET"] = str(int(job["rehearsal"]))  # triton reads it when it is imported
    if job["rehearsal"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    install_where_missing()

    with os.fdopen(descriptor, "w", buffering=1) as pipe:

        def send(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message, allow_nan=False) + "\n")

        from tests.gpu.card import Card

        card = Card.find(rehearsal=job["rehearsal"])
        if isinstance(card, str):
            print(card)
            return NO_GPU
        for item in job["items"]:
            send({"begin": item})
            error = run_item(item, card, job["facts"], send)
            broken = error is not None and not card.is_sound()
            send({"end": item, "error": error})
            if broken:
                return BROKEN
    return 0


def run_item(item: str, card: Any, facts: dict[str, Any], send: Any) -> str | None:
    """One section, or a part of one: ``name`` or ``name:part``. The traceback of what it raised."""
    name, _, part = item.partition(":")
    known = set(facts)

    def send_figure(figure: Figure) -> None:
        send({"figure": figure.to_json()})

    try:
        section = importlib.import_module(f"tests.gpu.{name}")
        report = Report(name, send_figure, rehearsal=card.rehearsal)
        again = section.run(card, report, facts, part) if part else section.run(card, report, facts)
        if again is not None:
            send({"again": f"{name}:{again}"})
            raise RuntimeError(f"the card's context broke at part {again} of {name}")
    except Exception:
        return traceback.format_exc()
    finally:
        for fact in facts.keys() - known:
            send({"fact": [fact, facts[fact]]})
        card.release()
    return None


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2])))
