"""Evaluation of a draft: the numbers are those of the rollouts, and the files appear."""

from __future__ import annotations

import json

import pytest
from toy import chain_target, toy_llm, toy_options

from exactspec.bench import eval_draft as module
from exactspec.bench.eval_draft import EvalOptions, eval_draft, format_report
from exactspec.errors import ConfigError
from exactspec.train.run import train


def test_report_of_a_toy_draft(tmp_path, monkeypatch):
    target = chain_target(sharpness=0.35)
    options = toy_options(tmp_path, "dspark", steps=30)
    train(options, target, report=lambda metrics: None)
    monkeypatch.setattr(module, "LLM", lambda name, draft, acceptance, **others: toy_llm(target, draft, acceptance))
    asked = EvalOptions(
        "toy", str(options.out), (tmp_path / "prompts.jsonl",), num_prompts=6, max_new_tokens=20, max_prompt=60
    )
    report = eval_draft(asked, tmp_path / "report")
    cells = {(c["temperature"], c["acceptance"]): c for c in report["cells"]}
    assert set(cells) == {(0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection")}
    for cell in cells.values():
        assert 1.0 <= cell["tau"] <= 5.0
        assert cell["tokens"] == 6 * 20
        assert len(cell["conditional_acceptance"]) == 4
        parts = cell["milliseconds_per_request_round"]
        assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"), rel=0.02)
    assert report["macro_tau"]["T=0 coupled"] == cells[0.0, "coupled"]["tau"]
    assert report["calibrated"] is False
    assert 0 <= report["confidence"]["T=1"]["mean_ece_conditional"] <= 1
    assert json.loads((tmp_path / "report" / "eval.json").read_text()) == report
    assert (tmp_path / "report" / "reliability.png").exists()
    assert "macro tau, T=1 rejection" in format_report(report)


def test_wrong_settings_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="prompts: name at least one"):
        eval_draft(EvalOptions("toy", "x", ()))
    target = chain_target()
    monkeypatch.setattr(module, "LLM", lambda *a, **k: toy_llm(target, "ngram"))
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a prompt of more than ten bytes"}')
    with pytest.raises(ConfigError, match=r"max_prompt: no prompt of .* at most 10 tokens"):
        eval_draft(EvalOptions("toy", "ngram", (path,), max_prompt=10))
