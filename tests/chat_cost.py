"""What the chat costs the window: gaps between turns of its event loop while an answer streams, and opening times.

    QT_QPA_PLATFORM=offscreen python -m tests.chat_cost

Real widgets in a window of 1100 × 700. An answer of 20,000 tokens comes at 500 tokens a second, as the engine's process
hands it over: some tokens every frame. Prints, for each kind of text, the longest gap between two turns of the event
loop; then how long histories take from the call until they are painted. On a machine that has other things to do a
gap is longer than the work in it: the work, processor time of the window's thread, stands beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication, QEvent, QTimer
from PySide6.QtWidgets import QApplication, QMainWindow

from app.chat.conversation import Conversation, Message, MessageStatus, Role
from app.chat.transcript import WARM_UP_MS, Transcript
from app.chat.tree import MessageTree
from app.selection import Selection
from app.theme import Theme
from engine.run_state import RunState
from tests.app.chat.long_answers import WORDS, mixed

TOKENS_PER_SECOND = 500
FRAME_SECONDS = 1 / 30
WIDTH, HEIGHT = 1100, 700
GAP_LIMIT_MS, OPENING_LIMIT_MS = 100, 300


def texts(tokens: int) -> dict[str, list[str]]:
    """Name → the tokens of an answer."""
    prose = [f"{WORDS[number % len(WORDS)]} " for number in range(tokens)]
    code = [("    value ", "= ", "call(", "1, ", "'a'", ")\n")[number % 6] for number in range(tokens)]
    table = [("| cell ", "| and ", "| text ", "| 1 |\n")[number % 4] for number in range(tokens)]
    items = [("- an ", "item ", "of ", "a ", "list\n")[number % 5] for number in range(tokens)]
    nested = [("- an ", "item\n", "  - under ", "it\n", "    - deep\n")[number % 5] for number in range(tokens)]
    return {
        "mixed": mixed(tokens, seed=5),
        "one paragraph": prose,
        "one code block": ["```python\n", *code],
        "one table": ["| a | b | c | d |\n|---|---|---|---|\n", *table],
        "one list": items,
        "one nested list": nested,
        "one thought, folded": ["<think>\n", *mixed(tokens, seed=6)],
        "one thought, unfolded": ["<think>\n", *mixed(tokens, seed=6)],
    }


@dataclass
class Gaps:
    """Times between turns of the event loop."""

    longest: float = 0.0
    most_work: float = 0.0
    work: float = 0.0
    _since: float = 0.0
    _worked: float = 0.0

    def turn(self) -> None:
        now, worked = time.perf_counter(), time.thread_time()
        if self._since:
            self.longest = max(self.longest, now - self._since)
            self.most_work = max(self.most_work, worked - self._worked)
            self.work += worked - self._worked
        self._since, self._worked = now, worked


class Bench:
    def __init__(self, app: QApplication, scheme: str) -> None:
        self.theme = Theme(app, scheme)
        self.transcript = Transcript(self.theme, Selection(), RunState())
        self.window = QMainWindow()
        self.window.setCentralWidget(self.transcript)
        self.window.resize(WIDTH, HEIGHT)
        self.window.show()
        _run_for(WARM_UP_MS / 1000 + 0.5)

    def stream(self, pieces: list[str], *, unfold: bool, rate: float) -> tuple[Gaps, float]:
        """Gaps while it streams and until all is drawn, and seconds of the last drawing after its end."""
        conversation = history(2)
        answer = conversation.path[-1]
        answer.text, answer.status = "", MessageStatus.STREAMING
        self.transcript.show_conversation(conversation)
        if unfold:
            self.transcript.memory.unfolded.add(answer.id)
        _run_for(0.1)
        gaps = Gaps()
        turns = QTimer()
        turns.timeout.connect(gaps.turn)
        turns.start(1)
        begun = time.perf_counter()
        given = 0

        def frame() -> None:
            nonlocal given
            due = min(len(pieces), int((time.perf_counter() - begun) * rate))
            answer.text += "".join(pieces[given:due])
            given = due
            answer.timings.count(1, time.perf_counter())
            self.transcript.refresh(answer.id)
            self.transcript.refresh_line(answer.id)

        frames = QTimer()
        frames.timeout.connect(frame)
        frames.start(round(1000 * FRAME_SECONDS))
        while given < len(pieces):
            _run_for(0.05)
        frames.stop()
        ended = time.perf_counter()
        answer.status = MessageStatus.COMPLETE
        self.transcript.refresh(answer.id)
        while self.transcript.view(answer.id).is_behind:
            _run_for(0.02)
        seconds = time.perf_counter() - ended
        _run_for(0.2)
        turns.stop()
        return gaps, seconds

    def open(self, conversation: Conversation) -> tuple[float, float, Gaps]:
        """Seconds until the window shows it, seconds of work in that, and the gaps until all is drawn."""
        self.transcript.show_conversation(history(0))
        _run_for(0.3)
        begun, worked = time.perf_counter(), time.thread_time()
        self.transcript.show_conversation(conversation)
        QCoreApplication.processEvents()
        self.window.repaint()
        shown, work = time.perf_counter() - begun, time.thread_time() - worked
        gaps = Gaps()
        turns = QTimer()
        turns.timeout.connect(gaps.turn)
        turns.start(1)
        _run_for(1.0)
        return shown, work, gaps


def history(messages: int, text: str = "") -> Conversation:
    """A conversation of so many messages; answers hold ``text``, or prose, lists and code."""
    found: list[Message] = []
    for number in range(messages):
        role = Role.ASSISTANT if number % 2 else Role.USER
        parent = found[-1].id if found else None
        words = (text or "".join(mixed(250, seed=number))) if number % 2 else f"Question {number}: what then?"
        found.append(Message(role, words, number=number, parent=parent))
    return Conversation(title="A long one", tree=MessageTree(found))


def _run_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        QCoreApplication.processEvents()
        time.sleep(0.001)
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chat_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="of each answer that streams (default: 20,000)")
    parser.add_argument("--rate", type=float, default=TOKENS_PER_SECOND, help="tokens per second (default: 500)")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--light", action="store_true", help="the light theme")
    arguments = parser.parse_args()
    app = QApplication.instance() or QApplication(sys.argv[:1])
    bench = Bench(app, "light" if arguments.light else "dark")
    good = True
    print(f"{'streaming':28} longest gap   most work   busy   drawn after its end")
    for name, pieces in texts(arguments.tokens).items():
        if arguments.only not in name:
            continue
        begun = time.perf_counter()
        gaps, after = bench.stream(pieces, unfold="unfolded" in name, rate=arguments.rate)
        share = gaps.work / (time.perf_counter() - begun)
        good &= 1000 * gaps.longest <= GAP_LIMIT_MS
        figures = f"{1000 * gaps.longest:8.0f} ms  {1000 * gaps.most_work:7.0f} ms  {100 * share:3.0f} %"
        print(f"{name:28} {figures}  {1000 * after:8.0f} ms", flush=True)
    print(f"\n{'opening':28}     shown  work in it   then longest gap   most work")
    long_answer = "".join(mixed(20_000, seed=8))
    openings = {
        "24 messages": history(24),
        "1,000 messages": history(1000),
        "one answer of 20,000 tokens": history(2, long_answer),
        "24 answers of 20,000 tokens": history(48, long_answer),
    }
    for name, conversation in openings.items():
        if arguments.only not in name:
            continue
        shown, work, gaps = bench.open(conversation)
        good &= 1000 * shown <= OPENING_LIMIT_MS and 1000 * gaps.longest <= GAP_LIMIT_MS
        figures = f"{1000 * gaps.longest:11.0f} ms  {1000 * gaps.most_work:8.0f} ms"
        print(f"{name:28} {1000 * shown:6.0f} ms  {1000 * work:7.0f} ms  {figures}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
