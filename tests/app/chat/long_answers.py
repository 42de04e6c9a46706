"""Long answers as tokens, the same for the same seed."""

from __future__ import annotations

import random

WORDS = ("the", "block", "table", "maps", "a", "`position`", "to", "**memory**", "[so](https://example.org)", "do.")


def mixed(tokens: int, seed: int) -> list[str]:
    """Tokens of prose, lists, tables and code."""
    rng = random.Random(seed)
    pieces: list[str] = []
    while len(pieces) < tokens:
        kind = rng.choice(["prose", "prose", "list", "code", "table"])
        if kind == "prose":
            pieces += [f"{rng.choice(WORDS)} " for _ in range(rng.randint(20, 200))] + ["\n\n"]
        elif kind == "list":
            for _ in range(rng.randint(3, 60)):
                pieces += ["- "] + [f"{rng.choice(WORDS)} " for _ in range(6)] + ["\n"]
            pieces.append("\n")
        elif kind == "code":
            pieces += ["```python\n"]
            for number in range(rng.randint(3, 120)):
                pieces += ["    value", f"_{number}", " = ", "call(", str(number), ")\n"]
            pieces.append("```\n\n")
        else:
            pieces += ["| a | b |\n", "|---|---|\n"] + [f"| {n} | x |\n" for n in range(rng.randint(2, 40))] + ["\n"]
    return pieces[:tokens]
