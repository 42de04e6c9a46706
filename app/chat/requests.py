"""What the chats ask of the engine, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.chat.conversation import ChatError, ContextPolicy, Conversation, MessageStatus
from app.chat.conversations import Conversations
from app.engine_bridge import EngineBridge
from app.translation import tr
from engine.client import EngineDied
from engine.messages import ContextCut, LoadFailed, Output
from engine.request import FinishReason


class Requests(QObject):
    begun = Signal()
    """Answers that waited for a model are with the engine."""
    changed = Signal(list)
    """Pairs of a conversation and an answer of it that has new text or a new state."""
    ended = Signal(list)
    """The same, of answers to which nothing more will come; they may have been in ``changed``."""
    refused = Signal(str, str)
    """Id of a conversation whose last answer could not go on and is as it was, and the reason, a sentence."""

    def __init__(
        self, bridge: EngineBridge, conversations: Callable[[], Conversations], parent: QObject | None = None
    ) -> None:
        """``conversations`` tells those there are now."""
        super().__init__(parent)
        self._bridge = bridge
        self._conversations = conversations
        self._links = [
            bridge.outputs.connect(self._take_outputs),
            bridge.context_cut.connect(self._context_cut),
            bridge.ready.connect(self._engine_ready),
            bridge.died.connect(self._engine_died),
            bridge.load_failed.connect(self._load_failed),
            bridge.state_changed.connect(self._state_changed),
        ]

    def check(self) -> None:
        """Raises :class:`ChatError` where nobody would answer."""
        if self._bridge.state not in ("ready", "starting", "loading"):
            raise ChatError(tr("No model is running; start the engine, then send again."))

    def begin(self, conversation: Conversation) -> None:
        """The open answer goes to the engine, or waits until there is one."""
        if self._bridge.state == "ready":
            self._hand_over(conversation)

    def close(self) -> None:
        """Listens no more."""
        for link in self._links:
            QObject.disconnect(link)
        self._links = []

    def _hand_over(self, conversation: Conversation) -> None:
        answer = conversation.open_answer
        assert answer is not None
        assert answer.params is not None
        sent = time.perf_counter()
        request_id = self._bridge.add_request(
            messages=conversation.context(),
            continues=answer.continued > 0,
            drop_oldest=conversation.policy is ContextPolicy.DROP_OLDEST,
            params=answer.params,
            priority=conversation.priority,
            user="chat",
            arrival_time=sent,
        )
        info = self._bridge.info
        self._conversations().handed_over(conversation, answer, request_id, sent, "" if info is None else info.name)

    def _engine_ready(self, _info: object) -> None:
        waiting = self._conversations().queued()
        for conversation, _ in waiting:
            self._hand_over(conversation)
        self.changed.emit(waiting)
        self.begun.emit()

    def _take_outputs(self, outputs: list[Output]) -> None:
        found, refused = [], []
        for output in outputs:
            if (each := self._conversations().apply(output)) is None:
                continue
            found.append(each)
            if output.finish_reason == FinishReason.ERROR and each[1].status is not MessageStatus.ERROR:
                refused.append((each[0], output.error))
        touched = {answer.id: (conversation, answer) for conversation, answer in found}
        self.changed.emit(list(touched.values()))
        ended = [pair for pair in touched.values() if not pair[1].status.is_open]
        if ended:
            self.ended.emit(ended)
        for conversation, reason in refused:
            self.refused.emit(conversation.id, tr("The answer stays as it was. {reason}", reason=reason))

    def _context_cut(self, cut: ContextCut) -> None:
        found = self._conversations().cut(cut)
        if found is not None:
            self.changed.emit([found])

    def _engine_died(self, death: EngineDied) -> None:
        self._lose(tr("This answer is incomplete. {reason}", reason=death.reason), queued=True)

    def _load_failed(self, failure: LoadFailed) -> None:
        self._lose(failure.message, queued=True)

    def _state_changed(self, state: str) -> None:
        if state in ("stopped", "starting"):
            self._lose(tr("The engine was stopped before this answer was complete."), queued=False)

    def _lose(self, sentence: str, *, queued: bool) -> None:
        lost = self._conversations().engine_gone(sentence, queued=queued)
        if lost:
            self.ended.emit(lost)
