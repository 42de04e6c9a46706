"""``bench --record``: the run file of a run without a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.messages import ModelInfo
from engine.recording import RunHeader
from engine.request import SamplingParams
from engine.run_log import RunLog

if TYPE_CHECKING:
    from engine.core import EngineCore, StepResult


@dataclass
class RunRecording:
    """Where a run is to be written; one that cannot be written is given up, and the run goes on."""

    path: str | Path
    texts: bool = False
    """Whether prompts and answers are kept."""
    failure: str = field(default="", init=False)
    """Why it was given up."""

    def __post_init__(self) -> None:
        self._log = RunLog(self._give_up)

    def of(
        self,
        core: EngineCore,
        decode: Callable[[list[int]], str],
        *,
        config: EngineConfig,
        info: ModelInfo,
        workload: str,
    ) -> RecordedCore:
        """The core, whose steps are written from here on; ``decode`` gives the text of a prompt."""
        header = RunHeader(config=config, info=info, workload=workload, texts=self.texts)
        self._log.open(self.path, header, core.keyframe())
        return RecordedCore(core, self._log, decode if self.texts else None)

    def close(self) -> None:
        self._log.close()

    def _give_up(self, reason: str) -> None:
        self.failure = reason


class RecordedCore:
    """A core as a :class:`engine.bench_run.WorkloadRun` uses it, each of whose steps is written to a run file."""

    def __init__(self, core: EngineCore, log: RunLog, decode: Callable[[list[int]], str] | None) -> None:
        """``decode``: None where texts are not kept."""
        self._core = core
        self._log = log
        self._decode = decode

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def add_request(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        stream_text: bool = True,
        **given: Any,
    ) -> None:
        """``stream_text`` is whether the client wants it; where texts are kept they are made in any case."""
        if self._decode is not None:
            if self._core.limits.refusal(prompt_token_ids, params, given.get("ends_after")) is None:
                self._log.prompt(request_id, self._decode(prompt_token_ids))  # else its ids may have no text
            stream_text = True
        self._core.add_request(request_id, prompt_token_ids, params, stream_text=stream_text, **given)

    def reject(self, request_id: int, message: str) -> None:
        self._core.reject(request_id, message)

    def step(self) -> StepResult:
        result = self._core.step()
        self._log.add(result, self._core.keyframe)
        return result
