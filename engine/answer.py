"""The text of one answer as it grows: detokenising and stop strings together, for the core's last stage of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.request import FinishReason, Request

if TYPE_CHECKING:
    from engine.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class AnswerStep:
    text: str
    """Certain now: never half a character, never the beginning of a stop string."""
    num_tokens: int
    """Tokens that belong to the answer, up to the one that completed a stop string."""
    stopped: bool
    """Whether a stop string ended it."""


class AnswerText:
    """Tokens in, certain text out.

    A token that ends the answer by its id gives no text. A stop string is not looked for before ``min_tokens`` tokens;
    the token that completes it belongs to the answer, its text does not.
    """

    def __init__(self, codec: TextCodec, request: Request, stream_text: bool) -> None:
        from engine.text.detokeniser import Detokeniser
        from engine.text.stops import StopStrings

        params = request.params
        self._detokeniser = Detokeniser(codec, request.token_ids[: request.num_prompt_tokens])
        self._stops = StopStrings(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._count = 0
        self._stream_text = stream_text

    def push(self, token_ids: list[int], ended: FinishReason | None) -> AnswerStep:
        """Take a step's tokens; with ``ended`` they are the last, so that nothing is held back any more."""
        by_id = ended is FinishReason.STOP
        silent = len(token_ids) if by_id else 0
        text = ""
        for position, token in enumerate(token_ids, start=1):
            if position == silent:
                break
            self._count += 1
            certain, stopped = self._check(self._detokeniser.push([token]))
            text += certain
            if stopped:
                return AnswerStep(self._shown(text), position, True)
        if ended is None:
            return AnswerStep(self._shown(text), len(token_ids), False)
        certain, stopped = self._check(self._detokeniser.flush())
        text += certain
        if self._stops is not None and not stopped:
            text += self._stops.flush()
        return AnswerStep(self._shown(text), len(token_ids), stopped)

    def flush(self) -> str:
        """What was held back, for an answer that is broken off."""
        return self.push([], FinishReason.ABORT).text

    def _check(self, text: str) -> tuple[str, bool]:
        if self._stops is None or self._count < self._min_tokens:
            return text, False
        return self._stops.push(text)

    def _shown(self, text: str) -> str:
        return text if self._stream_text else ""
