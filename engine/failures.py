"""Words for what went wrong without anybody having foreseen it. Light: no torch."""

from __future__ import annotations

_LONGEST_LINE = 300
_OUT_OF_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def describe(error: BaseException) -> str:
    """The error's type and the first line of what it says (its beginning, where it is long):
    ``RuntimeError: shape [3] is invalid``."""
    text = str(error).strip()
    name = type(error).__name__
    if not text:
        return name
    line = text.splitlines()[0].rstrip(".")
    return f"{name}: {line if len(line) <= _LONGEST_LINE else f'{line[:_LONGEST_LINE]}…'}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a GPU: torch says so by type on the one and by text on the other."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        words in str(error).lower() for words in _OUT_OF_MEMORY_WORDS
    )


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up. No ``except Exception`` sees that."""
    return type(error).__name__ == "PanicException"


def step_failure(error: BaseException) -> str:
    """The sentence for a step that raised."""
    if is_out_of_memory(error):
        return (
            f"Memory ran out in a step ({describe(error)}). Restart the engine with fewer KV blocks, a smaller "
            f"max_num_seqs or a smaller model."
        )
    return f"A step failed ({describe(error)}). Restart the engine."
