"""kill -9 at any moment: what was on the screen a second before is there when the program begins again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.chat.conversation import Conversation, Message, MessageStatus, Role
from app.chat.files import WIPING
from app.chat.store import ChatStore, SavedMessage
from tests.app.chat.killed import QUESTION
from tests.app.chat.version_1 import make_version_1

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a POSIX thing")
ROOT = Path(__file__).parents[3]


def start(what: str, path: Path, *before: str, platform: str = "offscreen") -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QT_QPA_PLATFORM": platform, "OMP_NUM_THREADS": "1"}
    command = [*before, sys.executable, "-m", "tests.app.chat.killed", what, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def kill(process: subprocess.Popen, pid: int | None = None) -> float:
    """When it was killed."""
    os.kill(pid or process.pid, signal.SIGKILL)
    killed = time.monotonic()
    process.wait(20)
    process.stdout.close()
    return killed


def opened(path: Path) -> list[Conversation]:
    store = ChatStore.open(path)
    assert store.is_kept and not store.notice
    conversations = store.conversations()
    for conversation in conversations:
        store.load_messages(conversation)
    store.close()
    return conversations


def check_answer(path: Path, seen: list[tuple[float, int]], killed: float) -> None:
    (found,) = opened(path)
    question, answer = found.path
    assert found.title == question.text == QUESTION
    assert answer.status is MessageStatus.INCOMPLETE and "ended before" in answer.error and not answer.damage
    safe = max(length for at, length in seen if at <= killed - 1.0) if seen[0][0] <= killed - 1.0 else 0
    assert safe <= len(answer.text)


def watch(process: subprocess.Popen, seconds: float) -> list[tuple[float, int]]:
    """What was seen until so long after the answer began."""
    seen: list[tuple[float, int]] = []
    for line in process.stdout:
        seen.append((time.monotonic(), int(line)))
        if seen[-1][0] - seen[0][0] > seconds:
            break
    return seen


@pytest.mark.parametrize("seconds", [0.0, 1.0, None, None])
def test_a_killed_window_keeps_the_question_and_what_was_seen_of_the_answer(store_path, seconds):
    seconds = random.uniform(0.2, 2.5) if seconds is None else seconds
    process = start("answer", store_path)
    seen = watch(process, seconds)
    check_answer(store_path, seen, kill(process))
    assert seconds < 1.5 or seen[-1][1] > 100


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="Xvfb is not installed")
def test_the_same_on_a_virtual_screen(store_path):
    server, reader, number = virtual_screen()
    try:
        process = start("answer", store_path, "env", f"DISPLAY=:{number}", platform="xcb")
        seen = watch(process, 1.3)
        if not seen:
            pytest.skip("Qt's xcb plugin does not start here")
        check_answer(store_path, seen, kill(process))
    finally:
        server.terminate()
        server.wait(10)
        os.close(reader)


def virtual_screen() -> tuple[subprocess.Popen, int, str]:
    """A server of its own on a display that it chooses, the end of the pipe that it told it through, and the number."""
    reader, writer = os.pipe()
    command = ["Xvfb", "-displayfd", str(writer), "-screen", "0", "1440x900x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.DEVNULL)
    os.close(writer)
    return server, reader, os.read(reader, 16).decode().strip()


def long_chat(path: Path, title: str, messages: int, length: int = 50) -> None:
    store = ChatStore.open(path)
    conversation = Conversation(title=title, created=1.0, updated=1.0)
    parent = None
    for number in range(messages):
        role = Role.ASSISTANT if number % 2 else Role.USER
        text = f"{title} {number} ".ljust(length, "x")
        message = Message(role, text, parent=parent, number=number, created=1.0)
        conversation.tree.add(message)
        parent = message.id
    store.save([conversation], [SavedMessage(conversation, message) for message in conversation.messages])
    store.close()


def kill_after(process: subprocess.Popen, seconds: float) -> None:
    assert process.stdout.readline() == "begun\n"
    time.sleep(seconds)
    kill(process)


def test_killed_while_deleting_a_message_is_gone_with_its_answer_or_there(store_path):
    long_chat(store_path, "kept", 40)
    for _ in range(3):
        kill_after(start("deletes", store_path), random.uniform(0.05, 0.4))
        (found,) = opened(store_path)
        numbers = [int(message.text.split()[1]) for message in found.path]
        assert found.num_messages == len(numbers) and not any(message.damage for message in found.path)
        gone = sorted(set(range(40)) - set(numbers))
        assert numbers == sorted(numbers) and len(gone) in (0, 2)
        if gone:
            assert gone[0] % 2 == 0 and gone[1] == gone[0] + 1
            store_path.unlink()
            long_chat(store_path, "kept", 40)


def test_killed_while_migrating_the_file_is_of_one_version_or_the_other(store_path):
    original = store_path.with_name("original")
    make_version_1(original, chats=40, turns=50, length=400)
    for _ in range(4):
        for old in store_path.parent.glob(store_path.name + "*"):
            old.unlink()
        shutil.copyfile(original, store_path)
        kill_after(start("migrate", store_path), random.uniform(0.0, 0.5))
        found = opened(store_path)
        assert len(found) == 40 and all(len(each.path) == each.num_messages == 100 for each in found)
        assert found[0].path[-1].text.startswith("answer 49")


def test_killed_while_restoring_there_is_one_state_or_the_other(store_path):
    for name in ("a", "b"):
        long_chat(store_path.with_name(name), name, 200, length=4000)
        store_path.with_name(name + ".lock").unlink()
    long_chat(store_path, "mine", 10)
    for _ in range(3):
        kill_after(start("restore", store_path), random.uniform(0.0, 0.5))
        (found,) = opened(store_path)
        assert found.num_messages == (10 if found.title == "mine" else 200)
        assert {message.text.split()[0] for message in found.path} == {found.title}
        kept = [each for path in store_path.parent.glob("*.before-restore-*") for each in opened(path)]
        assert found.title == "mine" or "mine" in [each.title for each in kept]


def test_killed_while_wiping_the_next_start_wipes_on(store_path):
    for _ in range(2):
        long_chat(store_path, "SECRET", 2000, length=2000)
        kill_after(start("wipe", store_path), random.uniform(0.0, 0.15))
        if opened(store_path):
            continue  # it had not begun
        assert not store_path.with_name(store_path.name + WIPING).exists()
        assert all(b"SECRET" not in path.read_bytes() for path in store_path.parent.iterdir())
