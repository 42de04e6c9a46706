"""Asks the engine how many tokens the open chat and the draft are, a while after the last change.

::

    change ──250 ms──▶ history, where it is not known ──▶ history + draft ──▶ ContextUse
                        │                                  ▲
                        └─▶ a sample of a very long draft ─┘ unless that alone says that it cannot fit

One query is under way at a time. With no model, no change or no chat on the screen nothing is asked and no timer runs.
While an answer is written the figures come from the run itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from PySide6.QtCore import QObject, QTimer, Signal

from app.chat.context_gauge import ContextUse
from app.chat.conversation import Conversation
from app.engine_bridge import EngineBridge
from engine.messages import ChatMessage, TokenCount

DELAY_MS = 250
SAMPLED_CHARACTERS = 100_000
"""A draft longer than this is first judged by a sample."""
SAMPLE_CHARACTERS, SAMPLE_PIECES = 16_000, 8
HOPELESS = 2
"""A draft that its sample makes this many times as long as the context is not counted: it does not fit."""
MOST_TOKENS_A_CHARACTER, MARKUP = 3, 40
"""What hardly any text exceeds: tokens for each of its characters, and for what a template puts around a message."""

_Kind = Literal["history", "sample", "total", "void"]
"""``void``: of a conversation that is another by now."""


class ContextMeter(QObject):
    changed = Signal()
    """``use``, ``error`` or ``is_current`` is another."""

    def __init__(self, bridge: EngineBridge, draft: Callable[[], str], parent: QObject | None = None) -> None:
        """``draft``: gives the message that is being written."""
        super().__init__(parent)
        self._bridge = bridge
        self._draft = draft
        self._conversation: Conversation | None = None
        self._active = False
        self.use: ContextUse | None = None
        """None: not known."""
        self.error = ""
        """Why the model cannot be told this conversation."""
        self._history: TokenCount | None = None
        self._query: tuple[int, _Kind, int] | None = None
        """Query under way: its id, what it counts, and of how long a draft."""
        self._sample: tuple[int, float] | None = None
        """Length of the draft that was sampled, and its tokens a character."""
        self._is_stale = False
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.ask)
        bridge.token_counted.connect(self._counted)
        bridge.state_changed.connect(self._engine_changed)
        bridge.compare_done.connect(lambda _done: self.draft_changed())
        bridge.stepped.connect(self._follow)

    # What can change -------------------------------------------------------------------------------------------------

    def watch(self, conversation: Conversation) -> None:
        """Another conversation; of the one before nothing is known any more."""
        if conversation is not self._conversation:
            self._conversation = conversation
            self._forget()
        self.context_changed()

    def context_changed(self) -> None:
        """What the model is told is another: messages, the system prompt, the policy or the length of answers."""
        self._history = None
        if self._query is not None:
            self._query = (self._query[0], "void", 0)
        self._follow()
        self.draft_changed()

    def draft_changed(self) -> None:
        self._is_stale = True
        if self.can_count:
            self._timer.start(DELAY_MS)
        else:
            self._timer.stop()

    def set_active(self, active: bool) -> None:
        """Whether anybody sees the figures."""
        if active != self._active:
            self._active = active
            self.context_changed()

    def _engine_changed(self, _state: str) -> None:
        self._query = None
        self._forget()
        self.draft_changed()

    def _forget(self) -> None:
        self._history = self._sample = None
        self._tell(None)

    # What is known ---------------------------------------------------------------------------------------------------

    @property
    def can_count(self) -> bool:
        conversation = self._conversation
        return (
            self._active
            and self._bridge.state == "ready"
            and not self._bridge.comparing
            and conversation is not None
            and conversation.is_loaded
            and not conversation.damage
            and conversation.open_answer is None
        )

    @property
    def is_current(self) -> bool:
        """Whether ``use`` is of what the field holds."""
        return not self._is_stale and self._query is None

    @property
    def window(self) -> int:
        """Tokens that model and memory have room for, prompt and answer; 0: no model."""
        info = self._bridge.info
        return 0 if info is None else min(info.max_model_len, info.num_blocks * info.block_size + 1)

    def may_not_fit(self, characters: int) -> bool:
        """Whether a draft of this length could be too long, as far as is known."""
        assert self._conversation is not None
        if self._history is not None:
            tokens = self._history.tokens
        else:
            tokens = sum(MOST_TOKENS_A_CHARACTER * len(m.content) + MARKUP for m in self._conversation.context())
        return tokens + MOST_TOKENS_A_CHARACTER * characters + MARKUP >= self.window - 1

    # Asking ----------------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Without waiting for a pause."""
        self._timer.stop()
        if not self.can_count or self._query is not None:
            return  # what is asked already is followed by another query where it is out of date
        self._is_stale = False
        context = self._conversation.context()
        if self._history is None:
            if context:
                self._send("history", context, 0)
                return
            self._history = TokenCount(0, 0)
        draft = self._draft()
        if not draft.strip():
            self._show(self._history, 0)
        elif len(draft) > SAMPLED_CHARACTERS and not self._is_sampled(draft):
            self._send("sample", [ChatMessage("user", _sample_of(draft))], len(draft))
        elif len(draft) > SAMPLED_CHARACTERS and self._estimate(draft) >= HOPELESS * self.window:
            tokens = self._history.tokens + self._estimate(draft)
            self._show(TokenCount(0, tokens, kept_tokens=tokens), len(draft), is_estimate=True)
        else:
            self._send("total", _with_draft(context, draft), len(draft))

    def _send(self, kind: _Kind, messages: list[ChatMessage], characters: int) -> None:
        query_id = self._bridge.count_tokens(messages, max_tokens=self._conversation.params.max_tokens)
        self._query = (query_id, kind, characters)

    def _is_sampled(self, draft: str) -> bool:
        return self._sample is not None and abs(self._sample[0] - len(draft)) < len(draft) // 20

    def _estimate(self, draft: str) -> int:
        assert self._sample is not None
        return round(self._sample[1] * len(draft))

    def _counted(self, count: TokenCount) -> None:
        if self._query is None or count.query_id != self._query[0]:
            return
        (_, kind, characters), self._query = self._query, None
        if not self.can_count:
            self.changed.emit()  # who waits for a count waits in vain
            return
        if kind == "history":
            # Some templates refuse a conversation that ends here; with the draft behind it they may not.
            self._history = count if not count.error else TokenCount(0, 0)
        elif kind == "sample":
            self._sample = (characters, count.tokens / SAMPLE_CHARACTERS)
        elif kind == "total":
            self._show(count, characters)
        if (kind != "total" or self._is_stale) and not self._timer.isActive():
            self.ask()

    def _show(self, count: TokenCount, characters: int, *, is_estimate: bool = False) -> None:
        if count.error or self._conversation is None:
            self._tell(None, count.error)
            return
        assert self._history is not None
        history = min(self._history.tokens, count.tokens)
        use = ContextUse(
            window=self.window,
            history=history,
            draft=count.tokens - history if characters else 0,
            max_tokens=self._conversation.params.max_tokens,
            policy=self._conversation.policy,
            dropped=count.dropped_messages,
            kept=count.kept_tokens,
            is_estimate=is_estimate,
        )
        self._tell(use)

    def _follow(self) -> None:
        """While an answer is written the run itself says how far it has come."""
        conversation = self._conversation
        answer = None if conversation is None else conversation.open_answer
        if not self._active or answer is None or answer.request_id is None:
            return
        request = self._bridge.run_state.requests.get(answer.request_id)
        if request is not None and self.window:
            used = request.prompt_tokens + request.output_tokens
            use = ContextUse(self.window, used, max_tokens=max(1, request.max_tokens - request.output_tokens))
            if use != self.use:
                self._tell(use)

    def _tell(self, use: ContextUse | None, error: str = "") -> None:
        self.use, self.error = use, error
        self.changed.emit()


def _with_draft(context: list[ChatMessage], draft: str) -> list[ChatMessage]:
    """The conversation as it is once ``draft`` is sent: a question without an answer and the next one are one."""
    if context and context[-1].role == "user":
        *context, last = context
        draft = f"{last.content}\n\n{draft}"
    return [*context, ChatMessage("user", draft)]


def _sample_of(text: str) -> str:
    """Pieces from all over ``text``, together ``SAMPLE_CHARACTERS`` long."""
    piece = SAMPLE_CHARACTERS // SAMPLE_PIECES
    stride = (len(text) - piece) // (SAMPLE_PIECES - 1)
    return "".join(text[start : start + piece] for start in range(0, SAMPLE_PIECES * stride, stride))
