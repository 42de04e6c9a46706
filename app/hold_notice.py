"""Why nothing moves although the engine is there: it pauses, or a comparison has it to itself."""

from __future__ import annotations

from app.chat.notice import NoticeBar
from app.engine_bridge import EngineBridge
from app.lab.compare_progress import progress_sentence
from app.settings.commands import Commands
from app.theme import Theme
from app.translation import tr
from app.words import as_sentence, count
from engine.messages import CompareProgress


class HoldNotice(NoticeBar):
    """Stays for as long as chats and loads wait, with the button that ends it."""

    def __init__(self, bridge: EngineBridge, theme: Theme, commands: Commands) -> None:
        super().__init__(theme)
        self._commands = commands
        self._bridge = bridge
        self._progress: CompareProgress | None = None
        bridge.compare_progress.connect(self._progressed)
        commands.changed.connect(self.refresh)

    def _progressed(self, progress: CompareProgress) -> None:
        self._progress = progress
        self.refresh()

    def refresh(self) -> None:
        bridge = self._bridge
        if bridge.state == "ready" and bridge.comparing:
            sentence = comparing_sentence(self._progress)
            if sentence != self.text:
                self.say(sentence, action=(tr("Cancel"), bridge.cancel_compare))
        elif bridge.state == "ready" and bridge.paused:
            step = bridge.run_state.step
            self.say(
                tr(
                    "Paused after step {step:,}: chats and loads wait; {run_on}, or {take_steps}.",
                    step=step,
                    run_on=self._commands.hint(tr("run on"), "engine.pause"),
                    take_steps=self._commands.hint(tr("take single steps"), "engine.step"),
                ),
                action=(tr("Run on"), lambda: bridge.set_paused(False)),
            )
        else:
            self.expire()


def comparing_sentence(progress: CompareProgress | None) -> str:
    """That a comparison has the engine, and how far it is."""
    begun = tr("A comparison has the engine; chats and loads wait for it.")
    if progress is None:
        return begun
    if progress.run < 0:
        waits = count(max(0, progress.requests - progress.completed), "answer")
        return tr(
            "A comparison begins when {waits} that run have ended; what is sent from here on waits for it.", waits=waits
        )
    return f"{begun} {as_sentence(progress_sentence(progress))}"
