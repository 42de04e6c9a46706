"""Messages over a pipe: whole, in order, and a bad one costs itself only."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from engine import wire
from engine.config import EngineConfig
from engine.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    AddRequest,
    Compare,
    ComparePlan,
    LoadModel,
    Output,
    Variant,
)
from engine.request import SamplingParams
from engine.workload import EngineOptions


def payload_of(message: msgspec.Struct) -> bytes:
    return wire.encode(message)[4:]


def raw_add(**fields: object) -> bytes:
    return msgspec.msgpack.encode({"command": "AddRequest", "request_id": 7, **fields})


def test_messages_come_whole_and_in_order_however_the_bytes_are_cut() -> None:
    messages = [Abort(n) for n in range(200)] + [
        AddRequest(5, SamplingParams(stop=("é", "x"), logit_bias={3: -1.5}), prompt="ü" * 70_000, priority=-2)
    ]
    data = b"".join(map(wire.encode, messages))
    read_end, write_end = os.pipe()
    got: list[object] = []
    reader = wire.read_payloads(read_end)
    cuts = random.Random(3)
    import threading

    def write() -> None:
        position = 0
        while position < len(data):
            size = cuts.choice([1, 2, 3, 5, 997, 30_000])
            wire.write_all(write_end, data[position : position + size])
            position += size
        os.write(write_end, b"\x10\x00")  # half a message before the end is dropped
        os.close(write_end)

    thread = threading.Thread(target=write)
    thread.start()
    got = [wire.read_command(payload) for payload in reader]
    thread.join()
    os.close(read_end)
    assert got == messages


def test_an_impossible_length_ends_the_stream_with_a_reason() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"\xff\xff\xff\xffrest")
    os.close(write_end)
    with pytest.raises(wire.WireError, match="4,294,967,295"):
        list(wire.read_payloads(read_end))
    os.close(read_end)


def test_a_message_larger_than_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(wire.WireError, match=f"{MAX_MESSAGE_BYTES:,}"):
        wire.encode(AddRequest(1, SamplingParams(), prompt="x" * (MAX_MESSAGE_BYTES + 1)))


@pytest.mark.parametrize("ids", [[2**64], [-(2**64)]])
def test_ids_beyond_64_bits_cannot_be_sent(ids: list[int]) -> None:
    with pytest.raises(wire.WireError, match="AddRequest cannot be sent"):
        wire.encode(AddRequest(1, SamplingParams(), prompt_token_ids=ids))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be at least 1"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 to 100"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1"),
    ],
)
def test_a_bad_parameter_is_the_request_s_own_fault(params: dict[str, object], message: str) -> None:
    import re

    got = wire.read_command(raw_add(params=params))
    assert isinstance(got, wire.BadRequest)
    assert got.request_id == 7
    assert re.fullmatch(message, got.message)


def test_wrong_types_are_refused_too() -> None:
    got = wire.read_command(raw_add(params={"max_tokens": "many"}))
    assert isinstance(got, wire.BadRequest)
    assert "max_tokens" in got.message


def test_a_bad_knob_of_the_engine_names_itself() -> None:
    config = msgspec.to_builtins(LoadModel(EngineConfig()))
    config["config"]["cache"]["block_size"] = 17
    got = wire.read_command(msgspec.msgpack.encode(config))
    assert isinstance(got, wire.BadConfig)
    assert got.message.startswith("block_size is 17; it must be a power of two")


def test_a_comparison_that_cannot_be_read_says_why() -> None:
    plan = ComparePlan("t", "", EngineOptions(), [Variant("a", EngineOptions(token_budget=3))], "a", [], [])
    command = msgspec.to_builtins(Compare(plan))
    command["plan"]["variants"][0]["options"]["token_budget"] = "three"
    got = wire.read_command(msgspec.msgpack.encode(command))
    assert isinstance(got, wire.BadPlan) and "token_budget" in got.message


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02", msgspec.msgpack.encode({"command": "Dance"})])
def test_what_is_no_command_is_ignored_aloud(payload: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert wire.read_command(payload) is None
    assert "ignored" in capsys.readouterr().err


def test_replies_carry_what_floats_and_text_can_hold() -> None:
    output = Output(1, 0.5, [3], "naïve 👩‍👩‍👧", finish_reason="stop")
    assert wire.reply_decoder.decode(payload_of(output)) == output
