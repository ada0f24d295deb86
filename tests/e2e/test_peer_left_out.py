"""Two answers that the peer's kits expect to end and that do not: transformers would have gone on alike."""

from __future__ import annotations

import pytest
import torch

from exactspec import LLM, SamplingParams
from exactspec.model.hub import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.long]

STORY = """
Please write an extremely detailed and vivid fantasy story, set in a world full of intricate magic systems, political intrigue, and complex characters.
Ensure that you thoroughly describe every scene, character's motivations, and the environment. Include long, engaging dialogues and elaborate on the inner thoughts of the characters.
Each section should be as comprehensive as possible to create a rich and immersive experience for the reader.
The story should span multiple events, challenges, and character developments over time. Aim to make the story at least 3,000 words long.
"""  # noqa: E501
CASES = {
    "story": ("You are a helpful AI assistant", STORY, SamplingParams(max_new_tokens=1000, temperature=0, stop="\n")),
    "json": (
        "You are a helpful assistant.",
        "Give me a json",
        SamplingParams(max_new_tokens=600, temperature=0, json_schema='{"type": "object"}'),
    ),
}


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", draft="ngram", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(llm):
    """The same weights in transformers, float32."""
    from transformers import AutoModelForCausalLM

    file = resolve_model("smollm2-135m")
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def allowed(llm, schema, token_ids):
    """The grammar's mask before each token, by xgrammar itself."""
    import xgrammar

    width = llm.engine.target.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(llm.tokenizer.hf, vocab_size=width, stop_token_ids=[2])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_json_schema(schema))
    masks = xgrammar.allocate_token_bitmask(len(token_ids), width)
    for row, token in enumerate(token_ids):
        matcher.fill_next_token_bitmask(masks, row)
        assert matcher.accept_token(token)
    return masks


@pytest.mark.parametrize("case", CASES)
def test_the_model_itself_never_gets_there(llm, reference, case):
    system, user, params = CASES[case]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    output = llm.chat(messages, params)[0]
    assert output.finish_reason.kind == "length"
    tokens = [*output.prompt_token_ids, *output.token_ids]
    with torch.no_grad():
        logits = reference(torch.tensor([tokens[:-1]])).logits[0, len(output.prompt_token_ids) - 1 :].float()
    if params.json_schema:
        import xgrammar

        xgrammar.apply_token_bitmask_inplace(logits, allowed(llm, params.json_schema, output.token_ids))
    assert logits.argmax(-1).tolist() == list(output.token_ids)
