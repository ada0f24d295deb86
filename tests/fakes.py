"""Tiny stand-ins, built in code: a random target with a byte-level tokenizer, and batches over a trivial page table.

They are real objects of the product's classes (LoadedTarget, Tokenizer, ForwardBatch), only small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights
from exactspec.model.config import ModelConfig
from exactspec.model.rope import default_rope
from exactspec.model.target import TargetModel
from exactspec.model.weights import LoadedTarget, ModelWeights
from exactspec.text.tokenizer import Tokenizer
from exactspec.types import ForwardBatch

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>")
NUM_BYTE_TOKENS = 256
EOS_ID = NUM_BYTE_TOKENS + SPECIAL_TOKENS.index("<eos>")
BOS_ID = NUM_BYTE_TOKENS + SPECIAL_TOKENS.index("<bos>")
TINY_VOCAB = NUM_BYTE_TOKENS + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """One token per byte (id = rank in GPT-2's alphabet), then SPECIAL_TOKENS. No merges: an emoji is four tokens."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(list(SPECIAL_TOKENS))  # fixes their ids
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    hf.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS[3:])})
    hf.chat_template = chat_template
    return Tokenizer(hf)


def tiny_config(**changes: Any) -> ModelConfig:
    """A two-layer Llama shape over the byte vocabulary; any field of ModelConfig can be changed."""
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": TINY_VOCAB, "hidden_size": 32, "intermediate_size": 64,
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rms_eps": 1e-5, "activation": "silu",
        "max_context": 512, "context_length": 512, "tied": False,
    }  # fmt: skip
    fields.update(changes)
    layers = fields["num_layers"]
    fields.setdefault("attention_scale", fields["head_dim"] ** -0.5)
    fields.setdefault("windows", (None,) * layers)
    fields.setdefault("rope_index", (0,) * layers)
    fields.setdefault("ropes", (default_rope(10_000.0, fields["head_dim"]),))
    return ModelConfig(**fields)


def random_layer(config: ModelConfig, generator: torch.Generator, dtype: torch.dtype, std: float) -> LayerWeights:
    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def norm(size: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size = config.num_heads * head_dim
    return LayerWeights(
        input_norm=norm(hidden),
        qkv=normal(q_size + 2 * config.num_kv_heads * head_dim, hidden),
        o=normal(hidden, q_size),
        mlp_norm=norm(hidden),
        gate_up=normal(2 * inter, hidden),
        down=normal(hidden, inter),
        q_norm=norm(head_dim) if config.qk_norm else None,
        k_norm=norm(head_dim) if config.qk_norm else None,
        post_attention_norm=norm(hidden) if config.post_norms else None,
        post_mlp_norm=norm(hidden) if config.post_norms else None,
    )


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.3, **changes: Any) -> LoadedTarget:
    """A random target. std 0.3 gives varied greedy text; a smaller one gives flatter logits.

    Same arguments, same weights. `vocab_size` may exceed TINY_VOCAB (padded embedding rows).
    """
    config = tiny_config(**changes)
    generator = torch.Generator().manual_seed(seed + 21)  # seed 0: greedy text that does not repeat itself soon
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(dtype)
    head = (torch.randn(config.vocab_size, config.hidden_size, generator=generator) * std).to(dtype)
    weights = ModelWeights(
        embed=embed,
        layers=[random_layer(config, generator, dtype, std) for _ in range(config.num_layers)],
        final_norm=1.0 + 0.1 * torch.randn(config.hidden_size, generator=generator),
        lm_head=embed if config.tied else head,
    )
    return LoadedTarget("tiny", config, weights, byte_tokenizer(), frozenset({EOS_ID}))


def tiny_model(**changes: Any) -> TargetModel:
    """tiny_target on the plain-torch CPU backend."""
    from exactspec.backend.torch_ref.backend import TorchBackend

    return TargetModel(TorchBackend("cpu"), tiny_target(**changes))


def make_batch(
    pieces: Sequence[tuple[int, Sequence[int]]], page_size: int = 4, pages: Sequence[Sequence[int]] | None = None,
    causal: bool = True,
) -> ForwardBatch:  # fmt: skip
    """A batch from (position of the first row, token ids) per request. Logit rows: all.

    `pages` gives each request's pages; by default request r owns a run of pages after those of request r - 1,
    enough for its tokens, in falling order (so that a mistake in the page arithmetic shows).
    """
    kv_lens = [start + len(ids) for start, ids in pieces]
    if pages is None:
        pages, used = [], 0
        for kv_len in kv_lens:
            count = -(-kv_len // page_size)
            pages.append(list(range(used + count - 1, used - 1, -1)))
            used += count
    width = max(len(p) for p in pages)
    table = torch.tensor([[*p, *[0] * (width - len(p))] for p in pages], dtype=torch.int32)
    token_ids, positions, slots, q_start = [], [], [], [0]
    for (start, ids), own in zip(pieces, pages, strict=True):
        where = range(start, start + len(ids))
        token_ids += ids
        positions += where
        slots += [own[p // page_size] * page_size + p % page_size for p in where]
        q_start.append(len(token_ids))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        q_start=torch.tensor(q_start, dtype=torch.int32),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table,
        logit_rows=torch.arange(len(token_ids)),
        page_size=page_size,
        causal=causal,
        max_kv_len=max(kv_lens),
        max_q_len=max(len(ids) for _, ids in pieces),
    )


def full_logits(model: TargetModel, token_ids: Sequence[int], pool: KVPool | None = None) -> Tensor:
    """Logits [len(token_ids), V] of a whole sequence in one forward, nothing cached."""
    batch = make_batch([(0, token_ids)])
    pool = pool or model.make_pool(batch.page_table.numel() * batch.page_size)
    hidden, _ = model.forward(batch, pool)
    return model.logits(hidden)
