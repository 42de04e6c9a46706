"""A module of ours as a process that tells what it does in lines; nothing of it runs in the window's process."""

from __future__ import annotations

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, Signal

from engine.environment import module_command, module_environment

_TAIL_CHARACTERS = 2000
_END_MILLISECONDS = 2000


class LineProcess(QObject):
    """One run at a time; :meth:`start` ends the one before without a word."""

    said = Signal(bytes)
    """A line of its standard output, without the end."""
    ended = Signal(int, str)
    """It has ended by itself, or could not be started: exit code, and the end of what it wrote as errors."""

    def __init__(self, module: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._module = module
        self._process: QProcess | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, *arguments: str, variables: dict[str, str] | None = None) -> None:
        """``variables``: of its environment, besides those of this process."""
        self.cancel()
        process = self._process = QProcess(self)
        environment = QProcessEnvironment()
        for name, value in {**module_environment(), **(variables or {})}.items():
            environment.insert(name, value)
        process.setProcessEnvironment(environment)
        program, *before = module_command(self._module, *arguments)
        process.readyReadStandardOutput.connect(lambda: self._read(process))
        process.finished.connect(lambda code, _status: self._finished(process, code))
        process.errorOccurred.connect(lambda error: self._failed(process, error))
        process.start(program, before)

    def cancel(self) -> None:
        """Ends it. Nothing more is told of it."""
        process, self._process = self._process, None
        if process is not None:
            process.blockSignals(True)
            process.kill()
            process.waitForFinished(_END_MILLISECONDS)
            process.deleteLater()

    def _read(self, process: QProcess) -> None:
        while process is self._process and process.canReadLine():
            self.said.emit(bytes(process.readLine().data()).rstrip(b"\n"))

    def _finished(self, process: QProcess, code: int) -> None:
        self._read(process)
        if process is self._process:
            self._process = None
            errors = bytes(process.readAllStandardError().data()).decode("utf-8", "replace")
            process.deleteLater()
            self.ended.emit(code, errors[-_TAIL_CHARACTERS:].strip())

    def _failed(self, process: QProcess, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart and process is self._process:
            self._process = None
            process.deleteLater()
            self.ended.emit(-1, process.errorString())
