"""A transformers fast tokenizer from a GGUF file's metadata."""

from __future__ import annotations

import logging
from typing import Any

from exactspec.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how text is cut before the merges; each pattern is applied to the pieces of the one before
SPLITS = {
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}


def make_hf_tokenizer(metadata: dict[str, Any], where: str) -> Any:
    """The tokenizer with its special tokens and chat template. Raises CheckpointError for unusable metadata."""
    from transformers import PreTrainedTokenizerFast

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{where}: metadata tokenizer.ggml.tokens is missing")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        rust = _byte_level(tokens, metadata, where)
    elif kind == "llama":
        rust = _sentencepiece(tokens, metadata, where)
    else:
        raise UnsupportedModelError(f"{where}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    named = _named_tokens(tokens, metadata, where)
    _add_special_tokens(rust, tokens, metadata)
    _add_bos(rust, named, metadata, default=kind == "llama")
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, clean_up_tokenization_spaces=False, **named)
    hf.chat_template = metadata.get("tokenizer.chat_template")
    return hf


def _byte_level(tokens: list[str], metadata: dict[str, Any], where: str) -> Any:
    """GPT-2 style BPE over bytes (Llama 3, SmolLM2, Qwen)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS and pre != "default":
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(SPLITS)}"
        )
    if pre == "default":
        logger.warning("%s: tokenizer.ggml.pre is not set; text is split as GPT-2 does", where)
    if "tokenizer.ggml.merges" not in metadata:
        raise CheckpointError(f"{where}: metadata tokenizer.ggml.merges is missing")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 takes a piece that is a token as it is, without going through the merges
    try:
        bpe = models.BPE(vocab=_vocab(tokens), merges=merges, ignore_merges=SPLITS.get(pre) == (_LLAMA3,))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{where}: tokenizer.ggml.merges do not fit its tokens: {error}") from error
    rust = Tokenizer(bpe)
    if SPLITS.get(pre) == (_QWEN2,):
        rust.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in SPLITS.get(pre, SPLITS["gpt-2"])]
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    rust.decoder = decoders.ByteLevel()
    return rust


def _sentencepiece(tokens: list[str], metadata: dict[str, Any], where: str) -> Any:
    """Sentencepiece BPE with byte fallback (Llama 2, Mistral, Gemma)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if is_gemma:  # runs of spaces are stored as real spaces
        tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocab = _vocab(tokens)
    if is_gemma:  # its scores do not follow the merge order, the ids do
        rank = vocab
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is None:
            raise CheckpointError(f"{where}: metadata tokenizer.ggml.scores is missing")
        order = sorted(range(len(tokens)), key=lambda i: -scores[i])
        rank = {tokens[i]: place for place, i in enumerate(order)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    rust = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_of(vocab, rank),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    replace = normalizers.Replace(" ", "▁")
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return rust


def merges_of(vocab: dict[str, int], rank: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that a sentencepiece vocabulary implies: all pairs of tokens that join to a third, best first."""
    found: list[tuple[int, int, int, str, str]] = []
    for token, place in rank.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((place, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _vocab(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _named_tokens(tokens: list[str], metadata: dict[str, Any], where: str) -> dict[str, str]:
    """bos_token, eos_token, ... as transformers wants them."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if token_id >= len(tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.{key}_token_id {token_id} is over the {len(tokens)} tokens")
        named[f"{name}_token"] = tokens[token_id]
    return named


def _add_special_tokens(rust: Any, tokens: list[str], metadata: dict[str, Any]) -> None:
    """Control tokens are special; user-defined ones (<think>) are matched whole but are plain text.

    Gemma's runs of spaces are user-defined too, under another spelling than in the vocabulary: merges find them.
    """
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type") or []
    pairs = list(zip(tokens, types, strict=False))
    rust.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL])
    vocab = rust.get_vocab()
    rust.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED and t in vocab])


def _add_bos(rust: Any, named: dict[str, str], metadata: dict[str, Any], default: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    parts = ["$A"]
    if metadata.get("tokenizer.ggml.add_bos_token", default) and "bos_token" in named:
        parts.insert(0, named["bos_token"])
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        parts.append(named["eos_token"])
    if len(parts) > 1:
        special = [(t, rust.token_to_id(t)) for t in parts if t != "$A"]
        rust.post_processor = TemplateProcessing(single=" ".join(parts), special_tokens=special)
