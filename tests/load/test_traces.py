"""Files people have: each format with its traps, what is rejected and why, what is clipped."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import json_array
from engine.bench_run import prepare
from engine.intake import Intake
from engine.json_array import array_entries
from engine.load_shapes import ShapeError
from engine.messages import AddRequest
from engine.request import SamplingParams
from engine.traces import TraceReader, load_workload
from engine.workload import Workload, WorkloadError, WorkloadRequest
from tests.load.fake_engine import Clock, FakeCodec, FakeCore


def write(tmp_path: Path, text: str, name: str = "data.bin") -> Path:
    path = tmp_path / name  # a name that says nothing: the content does
    path.write_text(text, encoding="utf-8")
    return path


def arrivals(workload: Workload) -> list[float]:
    return [r.arrival_s for r in workload.requests]


def lengths(workload: Workload) -> list[tuple[int | None, int]]:
    return [(r.prompt_tokens, r.output_tokens) for r in workload.requests]


# Azure ---------------------------------------------------------------------------------------------------------------


def test_azure_2023_has_seven_fraction_digits(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:03.9799607,110,27\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    workload = load_workload(write(tmp_path, text))
    assert workload.rows.format == "Azure LLM csv" and (workload.rows.read, workload.rows.rejected) == (3, 0)
    assert lengths(workload) == [(4808, 10), (110, 27), (3180, 8)]
    assert arrivals(workload) == pytest.approx([0.0, 7e-7, 0.052], abs=1e-12), "to the last digit"
    assert all(r.ignore_eos and r.clip for r in workload.requests)


def test_azure_2024_may_lack_the_fraction(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
        "2024-05-10 00:00:01+00:00,2399,6\r\n"
        "2024-05-10 02:00:01.5+02:00,76,1\r\n"
        "2024-05-10T00:00:02Z,76,0\r\n"
        "yesterday,76,1\r\n"
        "2024-13-45 00:00:00+00:00,76,1\r\n"
    )
    workload = load_workload(write(tmp_path, text))
    assert arrivals(workload) == pytest.approx([0.0, 0.99007, 1.49007])
    assert workload.rows.rejections == {"0 output tokens": 1, "a timestamp that cannot be read": 2}


def test_columns_count_by_name_and_rows_need_no_order(tmp_path: Path) -> None:
    text = "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens\n3,2024-05-10 00:00:09,30\n2,2024-05-10 00:00:05,20\n"
    workload = load_workload(write(tmp_path, text))
    assert lengths(workload) == [(30, 3), (20, 2)]
    assert arrivals(workload) == [4.0, 0.0], "the earliest comes at 0, wherever it stands"


# BurstGPT ------------------------------------------------------------------------------------------------------------

OLD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
NEW = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("header", "row"),
    [(OLD, "{t},ChatGPT,{p},{o},{s},Conversation log\n"), (NEW, "{t},7,1.5,GPT-4,{p},{o},{s},API log\n")],
)
def test_burstgpt_of_both_headers(tmp_path: Path, header: str, row: str) -> None:
    rows = [(5, 472, 18), (45, 1087, 0), (118.5, 417, 276), (119, 0, 3), (120, "x", 3), (121, 10**9, 3)]
    text = header + "".join(row.format(t=t, p=p, o=o, s=0) for t, p, o in rows) + "5,ChatGPT\n"
    workload = load_workload(write(tmp_path, text))
    assert workload.rows.format == "BurstGPT csv"
    assert lengths(workload) == [(472, 18), (417, 276)] and arrivals(workload) == [0.0, 113.5]
    assert workload.rows.rejections == {
        "0 response tokens: the request failed": 1,
        "0 prompt tokens": 1,
        "a token count that is no whole number": 1,
        "more than 1,000,000 prompt tokens": 1,
        "fewer columns than the header names": 1,
    }
    assert (workload.rows.read, workload.rows.rejected) == (7, 5)
    assert "7 rows of BurstGPT csv, 5 rejected (1 × 0 response tokens" in workload.rows.sentence()


# Mooncake ------------------------------------------------------------------------------------------------------------


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_equal_hash_ids_are_shared_prefixes_of_whole_blocks(tmp_path: Path) -> None:
    text = mooncake(
        (27_482, 1_200, 52, [46, 47, 2_366]),
        (27_482, 1_200, 26, [46, 47, 2_367]),
        (30_535, 700, 13, [46, 9]),
        (30_535, 700, 13, [8, 47]),
    )
    workload = load_workload(write(tmp_path, text))
    assert arrivals(workload) == [0.0, 0.0, 3.053, 3.053]
    a, b, c, d = (r.synthetic_ids(50_000) for r in workload.requests)
    assert [len(x) for x in (a, b, c, d)] == [1_200, 1_200, 700, 700]
    assert a[:1_024] == b[:1_024] and a[1_024:] != b[1_024:]
    assert a[:512] == c[:512] and a[512:700] != c[512:]
    assert d[:512] != a[:512], "another first block"
    again = load_workload(write(tmp_path, text), seed=1)
    assert again.requests[0].synthetic_ids(50_000)[:512] != a[:512], "another seed, other prompts"


def test_mooncake_rows_that_are_none(tmp_path: Path) -> None:
    text = mooncake((0, 10, 5, [1])) + '{"timestamp": 1}\n{"timestamp": 1, \nnull\n' + mooncake((7, 10, 0, []))
    text += '{"timestamp": 1e305, "input_length": 10, "output_length": 5}\n'
    workload = load_workload(write(tmp_path, text))
    assert workload.rows.rejections == {
        "timestamp, input_length or output_length is missing or no number": 2,
        "malformed JSON": 1,
        "0 output tokens": 1,
        "a timestamp that cannot be read": 1,
    }
    assert len(workload.requests) == 1


# Texts ---------------------------------------------------------------------------------------------------------------


def conversation(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}


def test_sharegpt_takes_the_first_answered_question(tmp_path: Path) -> None:
    entries = [
        conversation(
            ("human", "How do bees find home?"), ("gpt", "By the sun, by landmarks and by scent."), ("human", "…")
        ),
        conversation(("system", "Be brief."), ("human", "Grüße?"), ("gpt", "Hallo")),
        conversation(("gpt", "an answer to nothing")),
        conversation(("human", "alone")),
        conversation(("human", "x"), ("gpt", "  ")),
        {"id": "y", "conversations": []},
        {"id": "z"},
        "no entry",
    ]
    workload = load_workload(write(tmp_path, json.dumps(entries, indent=1)))
    assert [r.prompt for r in workload.requests] == ["How do bees find home?", "Grüße?"]
    assert [r.output_tokens for r in workload.requests] == [round(38 / 4), 1], "a token for four bytes"
    assert workload.rows.format == "ShareGPT json" and workload.rows.read == 8
    assert workload.rows.rejections == {"no two turns: a question and its answer": 5, "an empty turn": 1}
    assert arrivals(workload) == [0.0, 0.0] and not workload.open_loop
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    assert load_workload(write(tmp_path, lines)).requests == workload.requests


def test_halves_of_characters_cost_their_entry(tmp_path: Path) -> None:
    halves = [conversation(("human", "q\ud800"), ("gpt", "a")), conversation(("human", "q"), ("gpt", "a\udc00"))]
    text = json.dumps([*halves, conversation(("human", "whole \U0001f41d"), ("gpt", "a"))])
    assert "\\ud800" in text and "\\ud83d\\udc1d" in text
    workload = load_workload(write(tmp_path, text))
    assert [r.prompt for r in workload.requests] == ["whole \U0001f41d"]
    assert workload.rows.rejections == {"a text with half a character (a lone surrogate)": 2}


def test_a_truncated_download_gives_what_is_whole(tmp_path: Path) -> None:
    text = json.dumps([conversation(("human", f"q{i}"), ("gpt", "a")) for i in range(3)])
    workload = load_workload(write(tmp_path, text[:-30]))
    assert [r.prompt for r in workload.requests] == ["q0", "q1"]
    assert workload.rows.rejections == {"malformed JSON, or the file ends in the middle of an entry": 1}


def test_an_array_is_read_in_chunks_wherever_they_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"n": i, "text": 'ü]},{[\\"' * (i % 40)} for i in range(300)]
    path = write(tmp_path, "\ufeff [\n " + " ,\n".join(json.dumps(e, ensure_ascii=False) for e in entries) + " ]\n")
    for chunk in (5, 6, 7, 8, 64, 5_000):
        monkeypatch.setattr(json_array, "CHUNK_BYTES", chunk)
        with path.open("rb") as file:
            assert list(array_entries(file)) == entries


def test_a_large_array_is_never_whole_in_memory(tmp_path: Path) -> None:
    one = json.dumps(conversation(("human", "q" * 20), ("gpt", "a" * 8_000)))
    path = write(tmp_path, "[" + ",".join([one] * 4_000) + "]")
    assert path.stat().st_size > 32_000_000
    tracemalloc.start()
    try:
        workload = load_workload(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(workload.requests) == 4_000 and peak < path.stat().st_size / 4


def test_vllm_custom_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "Say it"}, {"prompt": "And again", "output_tokens": 7, "source": "mine"}, {"prompt": " "}]
    text = (
        "".join(json.dumps(row) + "\n" for row in rows)
        + '{"prompt": 5}\n{"prompt\n{"prompt": "x", "output_tokens": 0}\n'
    )
    workload = load_workload(write(tmp_path, text))
    first, second = workload.requests
    assert (first.prompt, first.output_tokens, first.ignore_eos) == ("Say it", 256, False), "the model ends it"
    assert (second.prompt, second.output_tokens, second.ignore_eos) == ("And again", 7, True)
    assert workload.rows.rejections == {
        "an empty prompt": 1,
        "prompt is no text, or output_tokens no whole number": 1,
        "malformed JSON": 1,
        "0 output tokens": 1,
    }


def test_a_file_of_ours_stays_strict_and_is_never_clipped(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"prompt": "a", "output_tokens": 3, "arrival_s": 4.0}\n{"prompt_tokens": 9, "output_tokens": 3}\n'
    )
    workload = load_workload(path, time_scale=2.0)
    assert workload.rows.format == "Batchscope jsonl" and arrivals(workload) == [2.0, 0.0]
    assert not any(r.clip for r in workload.requests)
    with pytest.raises(WorkloadError, match="line 1: there is no field 'priorty'"):
        load_workload(write(tmp_path, '{"prompt": "a", "output_tokens": 3, "priorty": 1}\n'))


# Unknown, empty, large -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,c\n1,2,3\n", "of no known format, it begins with 'a,b,c'; known are a ShareGPT json, an Azure"),
        ("[1, 2, 3]", "a JSON array, but not of ShareGPT conversations"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests: it holds no row of Azure LLM csv"),
        (OLD + "1,GPT-4,5,0,5,API log\n", "no usable request: 1 row of BurstGPT csv, 1 rejected"),
        ("", "no requests"),
    ],
)
def test_files_of_no_use_say_why(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(WorkloadError, match=words) as caught:
        load_workload(path)
    assert str(path) in str(caught.value)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(AZURE.encode(), mtime=0), "is packed by gzip; unpack it first"),
        (bz2.compress(AZURE.encode()), "is packed by bzip2; unpack it first"),
        (lzma.compress(AZURE.encode()), "is packed by xz; unpack it first"),
        (AZURE.encode("utf-16"), "is text in UTF-16; save it in UTF-8 first"),
        (b"PAR1" + bytes(90), "is a Parquet table; save it as csv or jsonl first"),
    ],
)
def test_files_to_be_unpacked_first_say_so(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(data)
    with pytest.raises(WorkloadError, match=words):
        load_workload(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_a_table_end_as_on_any_machine(tmp_path: Path, end: str) -> None:
    assert lengths(load_workload(write(tmp_path, AZURE.replace("\n", end)))) == [(4808, 10)]


def test_a_line_without_an_end_is_of_no_known_format(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="of no known format, it begins with 'xxx"):
        load_workload(write(tmp_path, "x" * 200_000))


def big(tmp_path: Path, rows: int) -> Path:
    lines = (f"2024-05-10 00:{i // 60 % 60:02}:{i % 60:02}+00:00,{i % 900 + 1},{i % 50 + 1}\n" for i in range(rows))
    return write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))


def test_only_the_rows_asked_for_are_read_and_the_clock_is_scaled(tmp_path: Path) -> None:
    path = big(tmp_path, 200_000)
    with TraceReader(path, limit=100, time_scale=4.0) as reader:
        assert reader.read(60) and reader.rows_read == 60
        assert not reader.read(60)
        assert reader.share == 1.0
        workload = reader.workload()
    assert workload.rows.read == len(workload.requests) == 100
    assert arrivals(workload)[:3] == [0.0, 0.25, 0.5]
    with TraceReader(path) as reader:
        reader.read(10)
        assert reader.share < 0.2, "what was asked for and a chunk, no more"


def test_more_requests_than_a_workload_holds_name_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.traces.MAX_REQUESTS", 50)
    path = big(tmp_path, 51)
    with pytest.raises(WorkloadError, match="more than 50 requests; read fewer of its rows"):
        load_workload(path)
    assert len(load_workload(path, limit=50).requests) == 50


def test_a_limit_beyond_every_file_reads_it_all(tmp_path: Path) -> None:
    assert len(load_workload(big(tmp_path, 3), limit=10**30).requests) == 3


@pytest.mark.parametrize("given", [{"time_scale": 0.0}, {"time_scale": float("nan")}, {"limit": 0}])
def test_options_that_make_no_sense(tmp_path: Path, given: dict) -> None:
    with pytest.raises(ShapeError, match=next(iter(given))):
        load_workload(big(tmp_path, 2), **given)


# Clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "kept"),
    [(60, 40, (60, 40)), (90, 40, (60, 40)), (4_808, 10, (90, 10)), (80, 90, (50, 50)), (20, 400, (20, 80))],
)
def test_the_prompt_gives_way_first_down_to_half_of_the_context(
    prompt: int, output: int, kept: tuple[int, int]
) -> None:
    request = WorkloadRequest(output, prompt_tokens=prompt, max_tokens=output + 9, prefix=((32, 5),), clip=True)
    whole = request.synthetic_ids(500)
    (made,) = prepare(Workload("x", (request,)), FakeCodec(), 500, 100)
    assert (len(made.prompt_token_ids), made.request.output_tokens) == kept
    assert made.clipped == (kept != (prompt, output))
    assert made.request.max_tokens == (min(output + 9, 100 - kept[0]) if made.clipped else output + 9)
    clean = request.synthetic_ids(500, FakeCodec.special_ids)
    assert made.prompt_token_ids == clean[: kept[0]] and len(whole) == prompt, (
        "its beginning stays, with what it shares"
    )


def test_texts_are_clipped_by_whoever_has_the_tokenizer() -> None:
    requests = (WorkloadRequest(10, prompt="x" * 300, clip=True), WorkloadRequest(10, prompt="y" * 300))
    clipped, whole = prepare(Workload("x", requests), FakeCodec(), 500, 100)
    assert (len(clipped.prompt_token_ids), clipped.clipped) == (90, True)
    assert (len(whole.prompt_token_ids), whole.clipped) == (300, False), "which the engine then refuses"


def test_the_engine_cuts_a_text_to_the_tokens_it_was_told() -> None:
    clock = Clock()
    core = FakeCore(clock)
    intake = Intake(FakeCodec(), SimpleNamespace(vocab_size=500, max_model_len=100), lambda cut: None)
    params = SamplingParams(max_tokens=2)
    for number, limit in enumerate((5, None), start=1):
        command = AddRequest(number, params, prompt="hello world", prompt_limit=limit, ends_after=2, arrival_time=0.0)
        intake.add(core, command)
    assert [len(ids) for _, ids, _ in core.added] == [5, 11]
    assert core.added[0][1] == core.added[1][1][:5]
