"""From the vocabulary in a GGUF file to a ``tokenizer.json``, for the two kinds that Llamas and Qwens come with.

``gpt2``: byte-level BPE; the file names the rule that splits text into words (``tokenizer.ggml.pre``), and the names
and rules are llama.cpp's. ``llama``: SentencePiece's BPE, whose merges follow from the scores: two neighbours that make
a token are joined, the token of the highest score first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.models.config_values import shown
from engine.models.errors import ModelLoadError

# Of ``tokenizer.ggml.token_type``.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALISED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_LLAMA3 = (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)
_TEKKEN = (rf"{_CAPITALISED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",)
_SMOLLM = (r"\p{N}", _WORDS_OF_GPT2)
_GPT2 = (_WORDS_OF_GPT2,)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS_OF_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "jais": _GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "exaone": _SMOLLM,
}
"""``tokenizer.ggml.pre`` → expressions; each cuts what the one before has left."""
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""A word that is in the vocabulary is that token, whatever the merges would make of it."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "megrez")
"""Made for text in Unicode's composed form (NFC), as their own tokenizers make it."""
_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Control tokens that end an answer, whether or not the file says so."""


def tokenizer_of(fields: Mapping[str, Any]) -> Tokenizer:
    """Raises :class:`ModelLoadError`, ``unsupported``, with the name of a kind of tokenizer that is not imported."""
    kind, tokens = fields.get("tokenizer.ggml.model"), _tokens(fields)
    if not isinstance(kind, str) or kind not in _MAKERS:
        raise ModelLoadError(
            f"The GGUF file's tokenizer is of the kind {shown(kind)}; Batchscope imports {', '.join(_MAKERS)}.",
            "unsupported",
        )
    try:
        tokenizer = _MAKERS[kind](fields, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelLoadError(f"The GGUF file's tokenizer contradicts itself: {error}.", "damaged") from error
    types = _types(fields, tokens)
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        added = [token for token, its in zip(tokens, types, strict=True) if its in wanted and token]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    bos = token_id(fields, "bos")
    if bos is not None and adds_bos(fields):
        name = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", "$B"], special_tokens=[(name, bos)]
        )
    return tokenizer


def token_id(fields: Mapping[str, Any], name: str) -> int | None:
    """The token that the file names as ``bos``, ``eos``, ``padding`` …; None where it names none, or one outside its
    vocabulary, as files do that mean none."""
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(
            f"The GGUF file's tokenizer.ggml.{name}_token_id is {shown(value)}; it must be a token's id.", "damaged"
        )
    return value if 0 <= value < len(_tokens(fields)) else None


def _tokens(fields: Mapping[str, Any]) -> list[str]:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError("The GGUF file has no vocabulary (tokenizer.ggml.tokens).", "damaged")
    if not isinstance(tokens, list) or not isinstance(tokens[0], str):
        raise ModelLoadError("The GGUF file's vocabulary (tokenizer.ggml.tokens) is no list of texts.", "damaged")
    return tokens


def adds_bos(fields: Mapping[str, Any]) -> bool:
    """Whether a text begins with the token for that; where the file does not say, as llama.cpp has it."""
    said = fields.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    return kind == "llama" or pre in _BOS_BY_DEFAULT


def ends_of_answer(fields: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: what the file names as that, and the control tokens that are known to."""
    tokens = _tokens(fields)
    named = [token_id(fields, name) for name in ("eos", "eot", "eom")]
    # A file may use such a token for something else, as SmolLM2's do for what is unknown.
    other = {token_id(fields, name) for name in ("bos", "unknown")}
    known = [
        number
        for number, (token, kind) in enumerate(zip(tokens, _types(fields, tokens), strict=True))
        if token in _TURN_ENDS and kind == _CONTROL and number not in other
    ]
    return sorted({number for number in [*named, *known] if number is not None})


def tokenizer_config_of(fields: Mapping[str, Any], context: int) -> dict[str, Any]:
    """``tokenizer_config.json``; ``context``: the model's, in tokens."""
    tokens = _tokens(fields)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = token_id(fields, key)
        if number is not None:
            config[f"{name}_token"] = tokens[number]
    config["add_bos_token"] = adds_bos(fields)
    config["clean_up_tokenization_spaces"] = False
    config["model_max_length"] = context
    if isinstance(fields.get("tokenizer.chat_template"), str):
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre") or "default"
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise ModelLoadError(
            f"The GGUF file's tokenizer splits text by the rule {shown(pre)}, which Batchscope does not know; it knows "
            f"{', '.join(_SPLITS)}.",
            "unsupported",
        )
    merges = [_pair(merge) for merge in fields.get("tokenizer.ggml.merges") or ()]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores")
    if not scores:
        raise ModelLoadError("The GGUF file's tokenizer has no scores (tokenizer.ggml.scores).", "damaged")
    unknown = token_id(fields, "unknown")
    types = _types(fields, tokens)
    if unknown is None and _UNKNOWN in types:
        unknown = types.index(_UNKNOWN)
    vocab = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(
        vocab,
        merges_by_score(tokens, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


_MAKERS: dict[str, Callable[[Mapping[str, Any], Sequence[str]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, those of the highest score first. Control tokens and bytes are never made
    of others."""
    vocab = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _types(fields: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    types = fields.get("tokenizer.ggml.token_type")
    if types is None:
        return [_NORMAL] * len(tokens)
    if not isinstance(types, list) or not all(isinstance(kind, int) for kind in types):
        raise ModelLoadError("The GGUF file's tokenizer.ggml.token_type is no list of numbers.", "damaged")
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"The GGUF file has {len(tokens):,} tokens and the types of {len(types):,}; one of the two is cut short.",
            "damaged",
        )
    return types
