"""Text of one answer while it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.text.codec import TextCodec

_CONTEXT_BYTES = 4
"""As many bytes of the prompt as can matter to the first character of the answer: the longest of UTF-8."""


class Detokeniser:
    """Turns an answer's tokens into text as they come, each at the same small cost.

    The deltas and the flush, joined, are what the whole (prompt and answer) decodes to behind the prompt's own text:
    never half a character in between, spaces as in the whole, control tokens left out.
    """

    def __init__(self, codec: TextCodec, prompt_token_ids: Sequence[int]) -> None:
        self._bytes = codec.token_bytes
        self._stream = self._bytes.stream()
        context: list[bytes] = []
        length = 0
        for token_id in reversed(prompt_token_ids):
            context.append(self._bytes.of(token_id))
            length += len(context[-1])
            if length >= _CONTEXT_BYTES:
                break
        for piece in reversed(context):
            self._stream.push(piece)

    def push(self, ids: Iterable[int]) -> str:
        """Text that these tokens made certain."""
        return "".join([self._stream.push(self._bytes.of(token_id)) for token_id in ids])

    def flush(self) -> str:
        """What is left at the end of the answer: nothing, or one U+FFFD for a character that was cut short."""
        return self._stream.flush()
