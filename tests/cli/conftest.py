"""A tiny checkpoint folder as transformers would save it, for commands that take a model path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import CHAT_TEMPLATE, TINY_VOCAB, byte_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=258,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer().hf
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
