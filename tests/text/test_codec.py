"""Plain text to ids and back, against the reference tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.models.errors import ModelLoadError
from engine.text.codec import TextCodec
from tests.text.tiny_tokenizers import adding_bos, byte_level, llama2, metaspace_first, save

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level with bos": lambda: adding_bos(byte_level()),
    "llama 2": lambda: adding_bos(llama2()),
    "metaspace first": lambda: adding_bos(metaspace_first()),
}
TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    " leading and trailing ",
    "  two  spaces\n\n\tand tabs",
    "<s>text",
    "a<s> b</s>c",
    "12345 3.14",
    "Größe 数学 😀👨‍👩‍👧 ไทย 한글 \x00\u200d",
    "don't I'LL",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_the_reference(tmp_path: Path, kind: str, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = save(tmp_path / "model", KINDS[kind]())
    codec = TextCodec.from_folder(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = codec.encode(text)
    assert ids == reference.encode(text)
    assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("processor", [True, False])
def test_ends_are_added_where_the_reference_adds_them(
    tmp_path: Path, add_bos: bool | None, add_eos: bool | None, processor: bool
) -> None:
    """``tokenizer.json`` decides; ``add_bos_token`` and ``add_eos_token`` beside it do nothing (as in Transformers)."""
    from transformers import PreTrainedTokenizerFast

    config = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    tokenizer = adding_bos(byte_level()) if processor else byte_level()
    folder = save(tmp_path / "model", tokenizer, **{name: add for name, add in config.items() if add is not None})
    expected = PreTrainedTokenizerFast.from_pretrained(folder).encode("Hello")
    assert TextCodec.from_folder(folder).encode("Hello") == expected


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level()
    plain = tokenizer.encode("Hello world, hello there").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    assert TextCodec.from_folder(save(tmp_path / "model", tokenizer)).encode("Hello world, hello there") == plain


def test_ids_outside_the_tokenizer_decode_to_nothing(tmp_path: Path) -> None:
    codec = TextCodec.from_folder(save(tmp_path / "model", byte_level()))
    ids = codec.encode("Hello")
    assert codec.decode([codec.vocab_size + 7, *ids, 10**9]) == "Hello"


def test_special_ids_are_known(tmp_path: Path) -> None:
    tokenizer = byte_level()
    codec = TextCodec.from_folder(save(tmp_path / "model", tokenizer))
    assert codec.special_ids == {tokenizer.token_to_id(t) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")}
    assert codec.bos_token_id == tokenizer.token_to_id("<s>")
    assert codec.eos_token_id == tokenizer.token_to_id("</s>")


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json") as refused:
        TextCodec.from_folder(tmp_path)
    assert refused.value.kind == "damaged"
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError) as refused:
        TextCodec.from_folder(tmp_path)
    assert refused.value.kind == "unsupported"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "Unheard"}}'])
def test_damaged_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="cannot be read") as refused:
        TextCodec.from_folder(tmp_path)
    assert refused.value.kind == "damaged"


def test_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", byte_level())
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelLoadError, match="WordPiece") as refused:
        TextCodec.from_folder(folder)
    assert refused.value.kind == "unsupported"


def test_starter_ids_are_smollms(starter_folder: Path) -> None:
    """Known ids of SmolLM2; every digit is a token of its own, also behind a space."""
    codec = TextCodec.from_folder(starter_folder)
    assert codec.encode("Hello world") == [19556, 905]
    assert codec.encode(" 2024") == [216, 34, 32, 34, 36]
    assert codec.encode("<|im_start|>") == [1]
    assert codec.bos_token_id == 1
    assert codec.eos_token_id == 2
    assert codec.vocab_size == 49_152
