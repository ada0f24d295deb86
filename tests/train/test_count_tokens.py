"""Which tokens a target says decides which tokens its draft proposes."""

from __future__ import annotations

import json

import pytest
import torch
from toy import chain_target, toy_llm, toy_options

from exactspec.errors import ConfigError
from exactspec.train import count_tokens as module
from exactspec.train.count_tokens import shorten_vocabulary
from exactspec.train.run import train
from exactspec.types import SamplingParams


@pytest.fixture
def drafted(tmp_path, monkeypatch):
    """(target, draft folder); the command's own engine is one around the toy, with groups of 8 prompts."""
    target = chain_target()
    options = toy_options(tmp_path, "dspark", steps=40)
    train(options, target, report=lambda metrics: None)
    monkeypatch.setattr(module, "LLM", lambda name, **others: toy_llm(target, None))
    monkeypatch.setattr(module, "GROUP", 8)
    return target, options.out


def prompts_file(tmp_path, count=20):
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{chr(97 + i)}{chr(122 - i)} and {i}"}) for i in range(count)))
    return path


def test_the_most_frequent_tokens_of_the_answers_are_kept(drafted, tmp_path):
    _, folder = drafted
    asked = prompts_file(tmp_path)
    facts = shorten_vocabulary("toy", folder, size=60, num_tokens=10_000, max_new_tokens=30, prompts=asked)
    content = json.loads((folder / "draft_vocab.json").read_text())
    assert content == {"token_ids": content["token_ids"], "target": "toy", **facts}
    assert facts["counted_tokens"] == 20 * 30  # the prompts end before 10,000
    assert 0.3 < facts["covered"] <= 1.0
    again = shorten_vocabulary("toy", folder, size=facts["distinct_tokens"], num_tokens=300, max_new_tokens=30)
    assert 300 <= again["counted_tokens"] < 600  # own prompts: as many groups as it takes


def test_a_draft_with_a_short_vocabulary_proposes_from_it_and_changes_no_answer(drafted, tmp_path):
    target, folder = drafted
    params = [SamplingParams(max_new_tokens=30, temperature=t, seed=7) for t in (0.0, 1.0)]
    prompts = [[65, 66, 67], [97, 98]]
    plain = toy_llm(target, None).generate(prompts, params)
    shorten_vocabulary("toy", folder, size=90, num_tokens=600, max_new_tokens=30, prompts=prompts_file(tmp_path))
    kept = set(json.loads((folder / "draft_vocab.json").read_text())["token_ids"])
    llm = toy_llm(target, str(folder))
    proposed = []
    draw = llm.engine.drafter.drawer.draw
    llm.engine.drafter.drawer.draw = lambda *a, **k: proposed.append(draw(*a, **k)) or proposed[-1]
    drafted_answers = llm.generate(prompts, params)
    assert [(o.token_ids, o.logprobs) for o in plain] == [(o.token_ids, o.logprobs) for o in drafted_answers]
    assert set(torch.cat([tokens.flatten() for tokens, _ in proposed]).tolist()) <= kept
    assert max(output.stats.accept_length for output in drafted_answers) > 1.2


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"size": 0}, "size: must be from 1 to 262, got 0"), ({"size": 263}, "size: must be from 1 to 262, got 263"),
     ({"size": 9, "num_tokens": 0}, "num_tokens: must be at least 1, got 0")],
)  # fmt: skip
def test_impossible_sizes_are_refused(drafted, settings, says):
    with pytest.raises(ConfigError, match=says):
        shorten_vocabulary("toy", drafted[1], **settings)
