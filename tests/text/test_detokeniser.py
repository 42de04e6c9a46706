"""Streamed text: never half a character, and joined it is the whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from engine.text.codec import TextCodec
from engine.text.detokeniser import Detokeniser
from tests.text.tiny_tokenizers import byte_level, llama2, metaspace_first, save

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "llama 2": llama2,
    "metaspace first": metaspace_first,
}
TRICKY = ["😀", "👨‍👩‍👧‍👦", "한글", "ไทย", "数学", "é", "Größe 😀 the fox", "\u0000\u200d"]


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    root = tmp_path_factory.mktemp("codecs")
    return {name: TextCodec.from_folder(save(root / name.replace(" ", "-"), kind())) for name, kind in KINDS.items()}


def byte_ids(codec: TextCodec, data: bytes) -> list[int]:
    """One token a byte."""
    single = {codec.token_bytes.of(token_id): token_id for token_id in reversed(range(codec.vocab_size))}
    return [single[bytes([byte])] for byte in data]


def streamed(codec: TextCodec, prompt: list[int], output: list[int]) -> list[str]:
    """The deltas token by token, and the flush as the last."""
    detokeniser = Detokeniser(codec, prompt)
    return [*(detokeniser.push([token_id]) for token_id in output), detokeniser.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TRICKY)
def test_characters_cut_at_every_byte_come_out_whole(codecs: dict[str, TextCodec], kind: str, text: str) -> None:
    codec = codecs[kind]
    prompt = codec.encode("the fox")
    deltas = streamed(codec, prompt, byte_ids(codec, text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    # Each character is there as soon as its last byte is, not later.
    ends = [delta for delta in deltas if delta]
    assert ends == list(text)


_PARTS = st.lists(
    st.text(max_size=5) | st.sampled_from(TRICKY) | st.sampled_from([" ", "  ", "\n", "the", " the", " dog", "<s>"]),
    max_size=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(list(KINDS)), parts=_PARTS, cut=st.integers(0, 40), ends=st.lists(st.integers(1, 5)))
def test_deltas_joined_are_the_whole_behind_the_prompt(
    codecs: dict[str, TextCodec], kind: str, parts: list[str], cut: int, ends: list[int]
) -> None:
    codec = codecs[kind]
    ids = codec.encode("".join(parts))
    cut = min(cut, len(ids))
    whole = codec._tokenizer.decode(ids, skip_special_tokens=True)
    prompt_stream = codec.token_bytes.stream()
    shown_before = "".join(prompt_stream.push(codec.token_bytes.of(token_id)) for token_id in ids[:cut])
    detokeniser = Detokeniser(codec, ids[:cut])
    deltas, position = [], cut
    for size in [*ends, len(ids)]:
        deltas.append(detokeniser.push(ids[position : position + size]))
        position += size
    assert shown_before + "".join(deltas) + detokeniser.flush() == whole
    # What was encoded from text has no invalid bytes: nothing but the text's own marks may be in a delta.
    assert "".join(deltas).count("\ufffd") <= "".join(parts).count("\ufffd")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@example(data=None)
def test_any_ids_decode_as_the_reference_decodes_them(codecs: dict[str, TextCodec], data: st.DataObject | None) -> None:
    """Byte-level ids chosen at random: mostly invalid UTF-8, with control tokens and ids beyond the vocabulary."""
    codec = codecs["byte level"]
    numbers = st.lists(st.integers(0, codec.vocab_size + 3), max_size=40)
    ids = list(range(codec.vocab_size)) if data is None else data.draw(numbers)
    assert codec.decode(ids) == codec._tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(codec, [], ids)) == codec.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_byte_gives_one_mark_and_stops_nothing(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    deltas = streamed(codec, codec.encode("a"), byte_ids(codec, b"\xf0 "))
    assert deltas == ["", "\ufffd ", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [b"\xf0", b"\x80", b"\xff", b"\xc3"])
def test_invalid_bytes_are_never_held_for_long(codecs: dict[str, TextCodec], kind: str, byte: bytes) -> None:
    codec = codecs[kind]
    detokeniser = Detokeniser(codec, codec.encode("a"))
    shown = ""
    for count, token_id in enumerate(byte_ids(codec, byte * 100), 1):
        shown += detokeniser.push([token_id])
        assert len(shown) >= count - 3
    shown += detokeniser.push(byte_ids(codec, b"ok"))
    assert shown == "\ufffd" * 100 + "ok"
    assert detokeniser.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_cut_inside_a_character_ends_with_one_mark(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    assert streamed(codec, codec.encode("a"), byte_ids(codec, "x😀".encode()[:-1])) == ["x", "", "", "", "\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_begun_in_the_prompt_is_finished_in_the_answer(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    ids = byte_ids(codec, "😀!".encode())
    assert streamed(codec, codec.encode("a") + ids[:2], ids[2:]) == ["", "😀", "!", ""]


@pytest.mark.parametrize("kind", ["llama 2", "metaspace first"])
def test_spaces_are_those_of_the_whole(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    tokenizer = codec._tokenizer
    hello, the, space, dog = (tokenizer.token_to_id(token) for token in ("▁hello", "▁the", "▁", "▁dog"))
    bos = tokenizer.token_to_id("<s>")
    assert None not in (hello, the, space, dog)
    # At the very beginning the first space is not part of the text; behind a prompt it is.
    assert streamed(codec, [], [hello, the]) == ["hello", " the", ""]
    assert streamed(codec, [bos], [hello, the]) == ["hello", " the", ""]
    assert streamed(codec, [hello], [the, space, dog]) == [" the", " ", " dog", ""]
    assert streamed(codec, [hello, bos], [the]) == [" the", ""]


def test_first_token_of_a_metaspace_decoder(tmp_path: Path) -> None:
    tokenizer = llama2()
    tokenizer.decoder = decoders.Metaspace()
    codec = TextCodec.from_folder(save(tmp_path / "model", tokenizer))
    ids = [tokenizer.token_to_id(token) for token in ("▁", "▁the", "▁dog")]
    assert "".join(streamed(codec, [], ids)) == tokenizer.decode(ids) == " the dog"


def test_words_without_a_decoder_are_separated(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = None
    codec = TextCodec.from_folder(save(tmp_path / "model", tokenizer))
    ids = codec.encode("the dog")
    assert "".join(streamed(codec, [], ids)) == codec._tokenizer.decode(ids)


def test_control_tokens_are_not_shown(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte level"]
    ids = codec.encode("a<|im_end|>b</s>")
    assert "".join(streamed(codec, codec.encode("the"), ids)) == "ab"


def test_starter_streams_what_its_tokenizer_decodes(starter_folder: Path) -> None:
    codec = TextCodec.from_folder(starter_folder)
    text = "Hello 👋🏽, naïve 数学: 3.14159 — ไทย\n\n  def f(x):\n\treturn x"
    ids = codec.encode(text)
    deltas = streamed(codec, codec.encode("Say:"), ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_token_costs_the_same_late_as_early(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte level"]
    detokeniser = Detokeniser(codec, [])
    ids = codec.encode("the quick brown fox 😀 ") * 200

    def best_of_three() -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for token_id in ids:
                detokeniser.push([token_id])
            times.append(time.perf_counter() - start)
        return min(times)

    early = best_of_three()
    for _ in range(20):
        detokeniser.push(ids)
    # A decoder that went back over the answer would be some twenty times slower by now.
    assert best_of_three() < 5 * early
