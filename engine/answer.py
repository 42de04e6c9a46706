"""The text of one answer as it grows: detokenising and stop strings together, for the core's last stage of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.request import FinishReason, Request
from engine.scheduling.plan import SchedulerOutput
from engine.scheduling.results import StepUpdate

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


class Answers:
    """The texts of all answers that are being written. ``codec`` None: nobody reads, there are only tokens."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._texts: dict[int, AnswerText] = {}
        """By request id."""

    @property
    def request_ids(self) -> Collection[int]:
        return self._texts.keys()

    def begin(self, request: Request, stream_text: bool) -> None:
        if self._codec is not None and (stream_text or request.params.stop):
            self._texts[request.request_id] = AnswerText(self._codec, request, stream_text)

    def flush(self, request: Request) -> str:
        """What was held back of an answer that is broken off."""
        answer = self._texts.get(request.request_id)
        return "" if answer is None else answer.flush()

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)

    def read(
        self,
        plan: SchedulerOutput,
        update: StepUpdate,
        errors: dict[int, str],
        drop_output: Callable[[Request, int], None],
    ) -> dict[int, str]:
        """Certain text by row. A stop string ends its request here, and so does text that cannot be made, with an
        error; ``drop_output`` takes back tokens behind such an end."""
        texts: dict[int, str] = {}
        if not self._texts:
            return texts
        for row, request in enumerate(plan.requests):
            tokens, answer = update.new_tokens[row], self._texts.get(request.request_id)
            ended = update.ended.get(row)
            if answer is None or not (tokens or ended):
                continue
            try:
                step = answer.push(tokens, ended)
            except Exception as error:  # one answer's text must not end its neighbours
                errors[row] = f"The answer could not be turned into text: {error}"
                update.ended[row] = FinishReason.ERROR
                continue
            texts[row] = step.text
            if step.stopped and ended is not FinishReason.ERROR:
                update.ended[row] = FinishReason.STOP
                update.new_tokens[row] = tokens[: step.num_tokens]
                drop_output(request, len(tokens) - step.num_tokens)
        return texts
