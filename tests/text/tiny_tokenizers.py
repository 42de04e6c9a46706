"""Tiny tokenizers of the kinds that checkpoints have, written as a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "Hello world, hello there", "a b c 1 2 3", "über Größe"] * 4
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(control: Sequence[str | AddedToken] = CONTROL) -> Tokenizer:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(control))
    return tokenizer


def _sentencepiece_model() -> models.BPE:
    """``▁`` words with a token for each byte."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocab += [token for token in learnt["vocab"] if token not in vocab]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learnt["merges"]]
    return models.BPE(
        {token: number for number, token in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True
    )


def llama2(control: Sequence[str | AddedToken] = ("<s>", "</s>", "<unk>")) -> Tokenizer:
    """SentencePiece BPE with byte fallback, a ``▁`` before each stretch of text: Llama 2 and the older Mistrals."""
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(control))
    return tokenizer


def metaspace_first(control: Sequence[str | AddedToken] = ("<s>", "</s>", "<unk>")) -> Tokenizer:
    """The same words with a ``▁`` only before the very first: newer Mistrals and Llamas converted without "legacy"."""
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(control))
    return tokenizer


def adding_bos(tokenizer: Tokenizer, bos: str = "<s>") -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, template: Any = CHATML, **config: Any) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        named["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder
