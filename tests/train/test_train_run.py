"""The whole way on a toy: data from the target, training, a checkpoint, and what serving makes of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from toy import chain_target, toy_llm, toy_options
from train_fakes import CPU

from exactspec.draft.block_model import block_attention_mask
from exactspec.draft.checkpoint import load_block_model, save_block_model
from exactspec.draft.vocabulary import read_draft_vocab
from exactspec.errors import CheckpointError, ConfigError
from exactspec.model.weights import LoadedTarget
from exactspec.train.blocks import BlockBatch
from exactspec.train.data import load_shards, pack, shard_name
from exactspec.train.frozen import FrozenTarget
from exactspec.train.new_draft import draft_config, new_block_model
from exactspec.train.objective import draft_hidden
from exactspec.train.options import recipe_for
from exactspec.train.rollouts import RecordingDrafter, run_rollouts
from exactspec.train.run import start_from, train
from exactspec.train.saving import write_tensors
from exactspec.train.trainer import Trainer, TrainingError
from exactspec.types import SamplingParams


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chain_target()


@pytest.fixture(scope="module", params=["dspark", "dflash"])
def trained(request, target, tmp_path_factory):
    """(target, checkpoint folder, last metrics)."""
    folder = tmp_path_factory.mktemp("toy")
    options = toy_options(folder, request.param)
    return target, options.out, train(options, target, report=lambda metrics: None)


def prompts_of(llm, count):
    texts = [f"{chr(97 + i)}{chr(122 - i)} qu{i}" for i in range(count)]
    return [llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def test_a_trained_draft_beats_prompt_lookup(trained):
    target, folder, metrics = trained
    taus = {}
    for draft in (str(folder), "ngram"):
        llm = toy_llm(target, draft)
        params = [SamplingParams(max_new_tokens=40, temperature=0.0, seed=i) for i in range(8)]
        _, rounds, _ = run_rollouts(llm, prompts_of(llm, 8), params)
        taus[draft] = rounds.tau
    assert taus[str(folder)] > 2.0
    assert taus[str(folder)] > taus["ngram"] + 0.5
    assert metrics["heldout_tau_t1"] > 1.3
    assert not metrics["interrupted"]


def test_served_proposals_are_those_of_the_training_forward(trained, tmp_path):
    """Greedy proposals of every round (first after prefill, after full acceptance, after rejections) against the
    packed forward that training uses, at the same anchors of the same text. The draft is made worse in steps, so that
    rounds of all kinds occur."""
    loaded, folder, _ = trained
    frozen = FrozenTarget(loaded, CPU, torch.float32)
    config = json.loads((folder / "config.json").read_text())
    compared, lengths = 0, set()
    for harm in (0.0, 0.3, 0.6, 1.0):
        model = load_block_model(folder)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.dim() == 2):
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * harm)
        save_block_model(model, tmp_path / str(harm), config, torch.float32)
        llm = toy_llm(loaded, str(tmp_path / str(harm)))
        recorder = RecordingDrafter(llm.engine.drafter)
        llm.engine.drafter = llm.engine.runner.drafter = recorder
        params = [SamplingParams(max_new_tokens=30, temperature=0.0, seed=i) for i in range(4)]
        for answer in llm.generate(prompts_of(llm, 4), params):
            tokens = [*answer.prompt_token_ids, *answer.token_ids]
            notes = recorder.proposed[(answer.seed, *answer.prompt_token_ids)]
            notes = [note for note in notes if len(note.token_ids) == 4]
            lengths |= set(answer.stats.accepted_per_round)
            assert [n.token_ids for n in notes] == offline_greedy(model, frozen, tokens, [n.anchor for n in notes])
            compared += len(notes)
    assert compared > 50
    assert len(lengths) > 3


def offline_greedy(model, frozen, tokens, anchors):
    """Greedy drafts at each anchor by the training forward; the Markov head, if any, runs left to right."""
    gamma, count = model.config.gamma, len(anchors)
    blocks = BlockBatch(
        token_ids=torch.tensor([tokens]),
        anchors=torch.tensor([anchors]),
        block=torch.arange(count).repeat_interleave(gamma),
        step=torch.arange(gamma).repeat(count),
        **{name: torch.zeros(0) for name in ("label", "previous", "target_row", "weight", "noise_seed")},
    )
    features, _ = frozen.forward(blocks.token_ids, model.config.target_layer_ids)
    with torch.no_grad():
        hidden = draft_hidden(model, frozen, blocks, features).view(count, gamma, -1)
        logits = hidden @ frozen.lm_head.t()
        previous = torch.tensor([tokens[a] for a in anchors])
        drafts = []
        for k in range(gamma):
            row = logits[:, k]
            if model.markov_head is not None:
                row = row + model.markov_head.bias(model.markov_head.embed(previous))
            previous = row.argmax(-1)
            drafts.append(previous)
    return torch.stack(drafts, 1).tolist()


def test_checkpoint_says_where_it_comes_from(trained):
    _, folder, metrics = trained
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["step"] == metrics["step"] == 80
    assert len(facts["data_sha256"]) == 64
    assert facts["data"][0]["sequences"] > 40
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 80


class Killed(BaseException):
    """Stands for the process being killed: nothing of ours handles it."""


def test_a_resumed_run_equals_an_uninterrupted_one(target, tmp_path, monkeypatch):
    """Killed between two checkpoints, the run goes on from the last one and ends with the very same weights."""
    whole = toy_options(tmp_path, "dspark", steps=24, checkpoint_every=8, out=tmp_path / "whole")
    train(whole, target, report=lambda metrics: None)
    broken = toy_options(tmp_path, "dspark", steps=24, checkpoint_every=8, out=tmp_path / "broken")
    step = Trainer._step

    def killed_at_step_13(self, blocks, rate):
        if self.progress.step == 13:
            raise Killed
        return step(self, blocks, rate)

    monkeypatch.setattr(Trainer, "_step", killed_at_step_13)
    with pytest.raises(Killed):
        train(broken, target, report=lambda metrics: None)
    assert [p.name for p in (tmp_path / "broken" / "state").iterdir()] == ["step-0000008"]
    monkeypatch.undo()
    train(broken, target, report=lambda metrics: None)
    one, two = load_block_model(whole.out).state_dict(), load_block_model(broken.out).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)

    def plain(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line.get("loss")) for line in lines]

    assert plain(whole.out)[-1] == plain(broken.out)[-1]
    assert len({s for s, _ in plain(broken.out)}) == len({s for s, _ in plain(whole.out)})


def test_ctrl_c_leaves_a_checkpoint_and_the_next_call_goes_on(target, tmp_path):
    options = toy_options(tmp_path, "dflash", steps=30, log_every=5)
    pressed = []

    def interrupt(metrics):
        if metrics["step"] == 10 and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    first = train(options, target, report=interrupt)
    assert first["interrupted"]
    stopped = first["step"]
    assert stopped == 10
    seen = []
    last = train(options, target, report=seen.append)
    assert seen[0]["step"] > stopped
    assert last["step"] == 30
    assert not last["interrupted"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one_whole(target, tmp_path, monkeypatch):
    from exactspec.train import state

    options = toy_options(tmp_path, "dflash", steps=20, checkpoint_every=8)
    write, calls = state.write_tensors, []

    def full_disk(path, tensors):
        calls.append(path)
        if len(calls) > 3:  # the second checkpoint's optimizer file
            path.with_name(path.name + ".part").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(state, "write_tensors", full_disk)
    with pytest.raises(ConfigError, match=r"step 16 cannot be written.*No space left.*step-0000008"):
        train(options, target, report=lambda metrics: None)
    assert [p.name for p in (options.out / "state").iterdir()] == ["step-0000008"]
    monkeypatch.undo()
    assert train(options, target, report=lambda metrics: None)["step"] == 20


def test_a_draft_that_cannot_be_written_leaves_the_state_to_go_on_from(target, tmp_path, monkeypatch):
    """The disk is full when the finished draft is written; the same command later writes it."""
    import safetensors.torch as writer

    options = toy_options(tmp_path, "dflash", steps=2)
    save_file = writer.save_file

    def full_disk(tensors, path, **options):
        if "metadata" in options:  # the served draft, not the training state
            Path(path).write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, **options)

    monkeypatch.setattr(writer, "save_file", full_disk)
    with pytest.raises(ConfigError, match=r"model.safetensors: cannot be written .*No space left.* training state"):
        train(options, target, report=lambda metrics: None)
    assert sorted(path.name for path in options.out.iterdir()) == ["metrics.jsonl", "state"]
    monkeypatch.undo()
    with open(options.out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"ste')  # half a line, which a full disk leaves as well
    assert train(options, target, report=lambda metrics: None)["step"] == 2
    assert (options.out / "model.safetensors").exists()
    assert all(json.loads(line)["step"] <= 2 for line in (options.out / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("log_every", [4, 50])
def test_nan_loss_stops_with_advice_and_saves_nothing_bad(log_every, target, tmp_path, monkeypatch):
    options = toy_options(tmp_path, "dflash", steps=20, log_every=log_every, checkpoint_every=4)
    step = Trainer._step

    def poisoned(self, blocks, rate):
        if self.progress.step == 9:
            with torch.no_grad():
                self.model.fc.weight.fill_(float("nan"))
        return step(self, blocks, rate)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(TrainingError, match=r"not finite at step 1[0-2].*lower muon_lr.*step-0000008"):
        train(options, target, report=lambda metrics: None)


def test_settings_that_changed_are_named_on_resume(target, tmp_path):
    train(toy_options(tmp_path, "dflash", steps=4), target, report=lambda metrics: None)
    with pytest.raises(ConfigError, match=r"seed: the run .* was started with 0, now it is 7"):
        train(toy_options(tmp_path, "dflash", steps=4, seed=7), target, report=lambda metrics: None)


def test_a_draft_to_start_from_is_looked_for_before_data_is_made(target, tmp_path):
    options = toy_options(tmp_path, "dflash", init_from=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        train(options, loaded=target)
    assert not list(options.data_path.glob("*.safetensors"))


def test_a_folder_with_data_of_another_vocabulary_is_refused(target, tmp_path):
    options = toy_options(tmp_path, "dflash", steps=2)
    alien = pack([[1, 2, 262, 5], [3, 4, 5, 6]], [2, 2])
    options.data_path.mkdir(parents=True)
    write_tensors(
        options.data_path / shard_name(0, 1), {n: getattr(alien, n) for n in ("tokens", "offsets", "prompt_len")}
    )
    with pytest.raises(ConfigError, match=r"data_folder: .* holds token 262, but the target's vocabulary has 262 rows"):
        train(options, target, report=lambda metrics: None)


def test_a_run_may_start_from_another_draft_of_the_same_shape(target, tmp_path):
    first = toy_options(tmp_path, "dflash", steps=40)
    train(first, target, report=lambda metrics: None)
    seen = []
    more = toy_options(
        tmp_path, "dflash", steps=2, warmup_steps=2, log_every=1, out=tmp_path / "more", init_from=first.out
    )
    train(more, target, report=seen.append)
    fresh = []
    new = toy_options(tmp_path, "dflash", steps=2, warmup_steps=2, log_every=1, out=tmp_path / "new")
    train(new, target, report=fresh.append)
    assert seen[0]["loss"] < fresh[0]["loss"] - 0.5
    deeper = toy_options(tmp_path, "dflash", steps=40, num_layers=2, out=tmp_path / "deeper", init_from=first.out)
    train(deeper, target, report=lambda metrics: None)
    back = toy_options(tmp_path, "dflash", steps=2, num_layers=1, out=tmp_path / "back", init_from=deeper.out)
    with pytest.raises(ConfigError, match=r"init_from: .*tensor layers\.1\."):
        train(back, target, report=lambda metrics: None)


def test_layers_that_are_added_to_a_draft_change_nothing_before_they_learn(target, tmp_path):
    small, large = (draft_config(target, recipe_for("dspark", num_layers=n, markov_rank=4)) for n in (1, 3))
    first = new_block_model(small, target.weights.embed, 1)
    save_block_model(first, tmp_path, small, torch.float32)
    grown = new_block_model(large, target.weights.embed, 2)
    start_from(grown, tmp_path, target)
    config = first.config
    features, blocks = torch.randn(6, config.feature_size), torch.randn(2, config.block_size, config.hidden_size)
    anchors, context = torch.tensor([3, 6]), torch.arange(6)
    mask = block_attention_mask(anchors, context, config.block_size)
    assert torch.equal(*(m(features, blocks, context, anchors, mask) for m in (first, grown)))
    grown(features, blocks, context, anchors, mask).square().sum().backward()
    assert all(layer.mlp.down_proj.weight.grad.any() for layer in grown.layers)  # and they can learn


def test_a_draft_may_keep_to_the_tokens_that_answers_use(target, tmp_path):
    options = toy_options(tmp_path, "dflash", steps=2, warmup_steps=2, draft_vocab_size=40)
    train(options, target, report=lambda metrics: None)
    kept = read_draft_vocab(options.out, 262)
    data = load_shards(options.data_path, 1)
    answers = [data.row(i)[data.prompt_len[i] :].tolist() for i in range(len(data))]
    most = Counter(token for answer in answers for token in answer).most_common(40)
    assert len(kept) == 40
    assert sum(count for token, count in most) == sum(answer.count(token) for answer in answers for token in kept)
    assert toy_llm(target, str(options.out)).engine.drafter.gamma == 4
    with pytest.raises(ConfigError, match="draft_vocab_size: must be at most 262"):
        train(toy_options(tmp_path, "dflash", draft_vocab_size=263, out=tmp_path / "wide"), target)


def test_a_time_limit_brings_the_rate_to_zero_and_ends_the_run(target, tmp_path):
    seen = []
    options = toy_options(tmp_path, "dflash", steps=100_000, max_seconds=1.5, log_every=2)
    last = train(options, target, report=seen.append)
    rates = [line["rate"] for line in seen if "rate" in line]
    assert 4 < last["step"] < 100_000
    assert rates[-1] < 0.35
    assert rates[-1] == min(rates[5:])
    load_block_model(options.out)


@pytest.mark.long
def test_two_processes_train_one_draft(tmp_path):
    """Over gloo: each has its own data shard and batches, gradients are averaged, weights stay equal. Ctrl-C in one of
    them ends both at the same step, to go on with the same weights; a time limit is by one clock."""
    toy_options(tmp_path, "dflash")  # writes the prompts
    worker_file = Path(__file__).parent / "ddp_worker.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here)])
    base = {
        **os.environ,
        "PYTHONPATH": paths,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(worker_file), str(tmp_path)], env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = [worker.communicate(timeout=200) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), [err[-1500:] for _, err in done]
    lines = [out.splitlines()[-4:] for out, _ in done]
    assert lines[0] == lines[1]
    assert lines[0][0].startswith("weights ")
    assert lines[0][0].endswith(" 12")
    assert lines[0][1:3] == ["interrupted True 5", "resumed True 12"]
    assert 4 < int(lines[0][3].rpartition(" ")[2]) < 100_000
    assert len(list((tmp_path / "data").glob("*-of-2.safetensors"))) == 2
    load_block_model(tmp_path / "dflash")
