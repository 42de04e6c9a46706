"""Vocabularies of GGUF files become tokenizers that give the ids of those that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from engine.messages import ChatMessage
from engine.models.errors import ModelLoadError
from engine.models.gguf_tokenizer import ends_of_answer, tokenizer_config_of, tokenizer_of
from engine.text.codec import TextCodec
from tests.text.tiny_tokenizers import CHATML, CORPUS, llama2, metaspace_first

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and  two spaces ",
    "a\n\n\n b\r\n\tc",
    "12345 3.14159 x2 ½ ٣",
    "don't I'LL they'Ve",
    "Größe 数学 😀👨‍👩‍👧 ไทย 한글 e\u0301",
    "camelCase HTTPServer snake_case!?...---",
    "<|im_start|>user <think> x</think>",
]


def byte_level_fields(pre: str | None, **more: Any) -> dict[str, Any]:
    """A vocabulary that was learnt from words of all kinds, so that merges reach over any edge that is not cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False, max_token_length=7, min_frequency=1
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS * 4], trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    tokens = [*learnt["vocab"], *ENDS, "<think>"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in learnt["merges"]]
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * len(learnt["vocab"]) + [CONTROL] * len(ENDS) + [USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": CHATML,
    }
    return {name: value for name, value in {**fields, **more}.items() if value is not None}


def sentencepiece_fields(**more: Any) -> dict[str, Any]:
    """The tests' own SentencePiece vocabulary, as llama.cpp's converter writes it: no merges, but scores."""
    model = json.loads(llama2().to_str())["model"]
    merges = ["".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in model["merges"]]
    rank = {merged: number for number, merged in reversed(list(enumerate(merges)))}
    tokens = list(model["vocab"])
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    types = [kinds.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 10_000)) for token in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
    }
    return {name: value for name, value in {**fields, **more}.items() if value is not None}


def codec_of(folder: Path, fields: dict[str, Any]) -> TextCodec:
    tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config_of(fields, 512)))
    return TextCodec.from_folder(folder)


# Byte-level ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_words_are_split_as_transformers_splits_them(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    fields = byte_level_fields(pre)
    names = {"tokenizer_type": "model", "pre_tokenizer_type": "pre"}
    given = {name: fields[f"tokenizer.ggml.{names.get(name, name)}"] for name in ("tokens", "merges", "token_type")}
    given |= {name: fields[f"tokenizer.ggml.{key}"] for name, key in names.items()}
    reference, _ = convert_gguf_tokenizer("llama", given)
    ours = tokenizer_of(fields)
    ours.normalizer = reference.normalizer  # theirs does not compose characters for Qwen, though its own tokenizer does
    for text in TEXTS:
        pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == [piece for piece, _ in reference.pre_tokenizer.pre_tokenize_str(text)]
        if pre not in ("llama-bpe", "llama3", "tekken"):  # these take words out of the vocabulary whole
            assert ours.encode(text).ids == reference.encode(text).ids


def test_the_words_of_gpt_2_and_smollm() -> None:
    """As the library's own pre-tokenizers cut them, which the original tokenizers are made of."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    for pre, reference in (("gpt-2", whole), ("smollm", digits), ("starcoder", digits)):
        ours = tokenizer_of(byte_level_fields(pre)).pre_tokenizer
        for text in TEXTS:
            assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), (pre, text)


def test_a_file_of_before_the_rules_had_names() -> None:
    ours = tokenizer_of(byte_level_fields(None)).pre_tokenizer
    pieces = [piece for piece, _ in ours.pre_tokenize_str("Hello, world 12345!")]
    assert pieces == ["Hello", ",", "Ġworld", "Ġ", "123", "45", "!"]


def test_qwens_text_is_composed_first(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, byte_level_fields("qwen2"))
    assert codec.encode("e\u0301") == codec.encode("é")
    plain = tokenizer_of(byte_level_fields("llama-bpe"))
    assert plain.encode("e\u0301").ids != plain.encode("é").ids


def test_a_word_of_the_vocabulary_is_one_token_in_llama_3() -> None:
    fields = byte_level_fields("llama-bpe")
    fields["tokenizer.ggml.tokens"].append("qzxj")  # no merge makes it
    fields["tokenizer.ggml.token_type"].append(NORMAL)
    assert tokenizer_of(fields).encode("qzxj").ids == [len(fields["tokenizer.ggml.tokens"]) - 1]
    assert len(tokenizer_of({**fields, "tokenizer.ggml.pre": "qwen2"}).encode("qzxj").ids) > 1


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_a_text_begins_as_the_file_says(tmp_path: Path, pre: str, said: bool | None, begins: bool) -> None:
    fields = byte_level_fields(pre)
    bos = fields["tokenizer.ggml.tokens"].index("<|endoftext|>")
    codec = codec_of(tmp_path, {**fields, "tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": said})
    assert (codec.encode("Hi")[0] == bos) is begins
    chat = codec.encode_chat([ChatMessage("user", "Hi")])
    assert chat.count(bos) == begins


def test_control_tokens_are_special_and_others_are_whole_words(tmp_path: Path) -> None:
    fields = byte_level_fields("qwen2")
    codec = codec_of(tmp_path, fields)
    tokens = fields["tokenizer.ggml.tokens"]
    assert codec.special_ids == {tokens.index(name) for name in ENDS}
    ids = codec.encode("<think>x<|im_end|>")
    assert (tokens[ids[0]], tokens[ids[-1]]) == ("<think>", "<|im_end|>")
    assert codec.decode(ids) == "<think>x"


# SentencePiece -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_merges_follow_from_scores(text: str) -> None:
    ours, reference = tokenizer_of(sentencepiece_fields()), llama2()
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == reference.decode(ids)
    bos = ours.token_to_id("<s>")
    assert ours.encode(text).ids == [bos, *ids]


def test_without_a_space_in_front(tmp_path: Path) -> None:
    fields = sentencepiece_fields(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    codec = codec_of(tmp_path, fields)
    reference = metaspace_first()
    ids = codec.encode("Hello world")
    assert codec.decode(ids) == "Hello world"
    assert "▁" not in reference.id_to_token(ids[0])


def test_letters_never_merge_to_a_control_token(tmp_path: Path) -> None:
    fields = sentencepiece_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    tokens += ["<", "/s>", "</", "s>", "<s"]
    fields["tokenizer.ggml.scores"] += [-1.0] * 5
    fields["tokenizer.ggml.token_type"] += [NORMAL] * 5
    codec = codec_of(tmp_path, {**fields, "tokenizer.chat_template": "{{ messages[0].content }}"})
    ids = codec.encode_chat([ChatMessage("user", "a</s><s>")])
    assert set(ids[1:]).isdisjoint(codec.special_ids)
    assert codec.decode(ids) == "a</s><s>"


# What ends an answer -------------------------------------------------------------------------------------------------


def test_all_that_ends_an_answer_is_known() -> None:
    fields = byte_level_fields("qwen2")
    tokens = fields["tokenizer.ggml.tokens"]
    assert ends_of_answer(fields) == sorted(tokens.index(name) for name in ("<|endoftext|>", "<|im_end|>"))
    unknown = {**fields, "tokenizer.ggml.unknown_token_id": tokens.index("<|endoftext|>")}
    assert ends_of_answer(unknown) == [tokens.index("<|im_end|>")]
    assert ends_of_answer({**unknown, "tokenizer.ggml.eot_token_id": 7}) == [7, tokens.index("<|im_end|>")]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "unsupported", "'rwkv'"),
        ({"tokenizer.ggml.model": "t5"}, "unsupported", "'t5'"),
        ({"tokenizer.ggml.pre": "viking"}, "unsupported", "'viking'"),
        ({"tokenizer.ggml.tokens": None}, "damaged", r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "damaged", "the types of 2"),
        ({"tokenizer.ggml.model": "llama"}, "damaged", "scores"),
        ({"tokenizer.ggml.merges": ["x qzxj"]}, "damaged", "qzxj"),
    ],
)
def test_a_tokenizer_that_is_not_imported_is_named(fields: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        tokenizer_of(byte_level_fields("qwen2", **fields))
    assert refused.value.kind == kind
