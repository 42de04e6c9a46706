"""What the window costs the engine: ``python -m tests.window_cost [--rounds 3] [--seconds 15] [--batch 8] [--json]``.

One engine process decodes a steady batch all the time. For ``--seconds`` each, in turn, its output is drained by a bare
loop that does nothing else, and by the real main window, offscreen, with every dock visible at once (or those of an
arrangement: ``--docks chat``) and one of the requests a chat that is drawn as it streams. Prints output tokens per
second of both and their ratio, round by round, and the share of a core that the window took; the median ratio is the
figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtCore import QEventLoop, QTimer

from app.docks import arrange
from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.start import delete_in_order, make_application
from app.theme import Theme
from engine.client import EngineClient, EngineDied
from engine.config import DTYPES, EngineConfig, SchedulerConfig
from engine.environment import share_cores
from engine.messages import AckFrame, AddRequest, ChatMessage, Frame, LoadFailed, Ready
from engine.request import SamplingParams
from tests.frame_cost import EVERYTHING

PARAMS = SamplingParams(max_tokens=8_000, ignore_eos=True)
QUESTION = "Explain continuous batching to a bus driver, at great length."
SETTLE_SECONDS = 3.0


def headless(config: EngineConfig, seconds: float) -> float:
    """Output tokens per second with a client that only reads."""
    client = EngineClient()
    client.start()
    client.load(config)
    tokens, begin, end = 0, float("inf"), float("inf")
    while time.perf_counter() < end:
        for reply in client.poll(0.05):
            if isinstance(reply, LoadFailed | EngineDied):
                raise SystemExit(f"the engine did not run: {reply}")
            if isinstance(reply, Ready):
                chat = [ChatMessage("user", QUESTION)]
                client.send(AddRequest(client.next_request_id(), PARAMS, messages=chat))
                for _ in range(config.scheduler.max_num_seqs - 1):
                    client.send(AddRequest(client.next_request_id(), PARAMS, prompt_tokens=32, stream_text=False))
                begin = time.perf_counter() + SETTLE_SECONDS
                end = begin + seconds
            elif isinstance(reply, Frame):
                client.send(AckFrame(reply.number))
                new = sum(sum(record.new_tokens) for record in reply.records)
                tokens += new if time.perf_counter() >= begin else 0
    client.close(5.0)
    return tokens / seconds


def windowed(config: EngineConfig, seconds: float, docks: str) -> tuple[float, float]:
    """Output tokens per second with the real window on the engine, and the share of a core that the window took."""
    application = make_application()
    bridge = EngineBridge()
    loop = QEventLoop()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        window = MainWindow(bridge, Theme(application), Path(folder) / "chats.sqlite3", runs_folder=runs)
        if docks == "all":
            window.resize(1920, 1200)
            window.show()
            arrange(window, window.docks, EVERYTHING)
        else:
            window.show()
            window.arrange(docks)
        marks: list[tuple[int, float]] = []

        def mark() -> None:
            marks.append((bridge.run_state.totals.output_tokens, time.process_time()))

        def begin() -> None:
            conversation = window.chat.new_conversation()
            window.chat.session.set_options(conversation, "", PARAMS)
            window.chat.send(QUESTION)
            for _ in range(config.scheduler.max_num_seqs - 1):
                bridge.add_request(params=PARAMS, prompt_tokens=32, stream_text=False)
            QTimer.singleShot(int(1000 * SETTLE_SECONDS), mark)
            QTimer.singleShot(int(1000 * (SETTLE_SECONDS + seconds)), lambda: (mark(), loop.quit()))

        bridge.ready.connect(begin)
        bridge.load_failed.connect(lambda failure: sys.exit(failure.message))
        window.launch(config, chosen=True)
        loop.exec()
        window.close()
        bridge.shutdown()
        delete_in_order(window, bridge)
    (tokens_before, cpu_before), (tokens, cpu) = marks
    return (tokens - tokens_before) / seconds, (cpu - cpu_before) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=8, help="requests that decode side by side (8)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--docks", choices=("all", "chat", "monitor", "lab"), default="all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    share_cores(os.environ)
    config = EngineConfig(
        dtype=arguments.dtype,
        threads=arguments.threads,
        scheduler=SchedulerConfig(max_num_seqs=arguments.batch),
    )
    rounds = []
    for number in range(arguments.rounds):
        without = headless(config, arguments.seconds)
        with_window, core = windowed(config, arguments.seconds, arguments.docks)
        rounds.append({"headless": without, "window": with_window, "ratio": with_window / without, "core": core})
        if not arguments.json:
            print(
                f"round {number + 1}: {without:.1f} tok/s headless, {with_window:.1f} with the window, which took "
                f"{core:.0%} of a core",
                flush=True,
            )
    ratio = statistics.median(row["ratio"] for row in rounds)
    print(json.dumps({"rounds": rounds, "median_ratio": ratio}) if arguments.json else f"median ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
