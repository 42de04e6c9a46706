"""What the kill tests end with SIGKILL: the program's own code, told by its first argument what to be busy with.

It prints a line for everything that the user has seen, at the moment of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication

from app.chat.session import ChatSession
from app.chat.store import ChatStore
from app.theme import Theme
from engine.config import EngineConfig
from tests.app.chat.fake_bridge import FakeBridge

QUESTION = "count for me"


def say(*words: object) -> None:
    print(*words, flush=True)


def answer(path: Path) -> None:
    """The window, with an answer streaming into it at 200 tokens a second."""
    from app.engine_bridge import EngineBridge
    from app.main_window import MainWindow
    from tests.app.scripted import ScriptedClient

    application = QApplication([])
    client = ScriptedClient(num_blocks=4096, max_model_len=60_000)
    bridge = EngineBridge(client=client)
    window = MainWindow(bridge, Theme(application, "dark"), path)
    window.show()
    bridge.start(EngineConfig(scheduler=client.scheduler))
    client.ready()
    timer = QTimer()
    timer.timeout.connect(lambda: client.step())
    timer.start(5)
    chat = window.chat

    def shown(conversation_id: str, message_id: str) -> None:
        message = chat.current.find(message_id)
        if message is not None:
            say(len(message.text))

    def begin() -> None:
        params = chat.current.params
        chat.session.set_options(chat.current, "", type(params)(max_tokens=50_000))
        assert chat.send(QUESTION)
        say(0)

    chat.session.message_changed.connect(shown)
    bridge.ready.connect(lambda _info: QTimer.singleShot(0, begin))
    application.exec()


def deletes(path: Path) -> None:
    """Messages deleted and brought back, as fast as it goes."""
    session = _session(path)
    (conversation,) = session.conversations
    session.open(conversation)
    say("begun")
    number = 0
    while True:
        shown = conversation.path
        deleted = session.delete_message(conversation, shown[number % len(shown)].id)
        session.undelete(conversation, deleted)
        number += 1


def migrate(path: Path) -> None:
    say("begun")
    ChatStore.open(path).close()
    say("done")


def restore(path: Path) -> None:
    """One backup after the other in the place of the chats."""
    session = _session(path)
    say("begun")
    while True:
        for name in ("a", "b"):
            session.restore_backup(path.with_name(name))


def wipe(path: Path) -> None:
    session = _session(path)
    say("begun")
    session.wipe()
    say("done")


def _session(path: Path) -> ChatSession:
    QApplication([])
    return ChatSession(FakeBridge(), path)


if __name__ == "__main__":
    {"answer": answer, "deletes": deletes, "migrate": migrate, "restore": restore, "wipe": wipe}[sys.argv[1]](
        Path(sys.argv[2])
    )
