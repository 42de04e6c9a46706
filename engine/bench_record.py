"""``bench --record``: the run file of a run without a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.messages import ModelInfo
from engine.recording import RecordingError, RunHeader, RunWriter
from engine.request import SamplingParams, branch_id

if TYPE_CHECKING:
    from engine.core import EngineCore, StepResult


@dataclass
class RunRecording:
    """Where a run is to be written; one that cannot be written is given up, and the run goes on."""

    path: str | Path
    texts: bool = False
    """Whether prompts and answers are kept."""
    failure: str = ""
    """Why it was given up."""
    _writer: RunWriter | None = field(default=None, init=False)

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
        keyframe = core.keyframe()

        def open_file() -> None:
            self._writer = RunWriter(self.path, header, keyframe=keyframe)

        self._try(open_file)
        return RecordedCore(core, self, decode)

    def step(self, core: EngineCore, result: StepResult) -> None:
        writer = self._writer
        if writer is None:
            return

        def write() -> None:
            if result.record is not None:
                writer.add(result.record, core.keyframe)
            for output in result.outputs:
                writer.text(branch_id(output.request_id, output.index), "assistant", output.text)

        self._try(write)

    def prompt(self, request_id: int, text: str) -> None:
        if (writer := self._writer) is not None:
            self._try(lambda: writer.text(request_id, "prompt", text))

    def close(self) -> None:
        if (writer := self._writer) is not None:
            self._try(writer.close)
            self._writer = None

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except RecordingError as error:
            self._writer, self.failure = None, str(error)


class RecordedCore:
    """A core as a :class:`engine.bench_run.WorkloadRun` uses it, each of whose steps is written to a run file."""

    def __init__(self, core: EngineCore, recording: RunRecording, decode: Callable[[list[int]], str]) -> None:
        self._core = core
        self._recording = recording
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
        texts = self._recording.texts
        if texts:
            self._recording.prompt(request_id, self._decode(prompt_token_ids))
        self._core.add_request(request_id, prompt_token_ids, params, stream_text=stream_text or texts, **given)

    def reject(self, request_id: int, message: str) -> None:
        self._core.reject(request_id, message)

    def step(self) -> StepResult:
        result = self._core.step()
        self._recording.step(self._core, result)
        return result
