"""Prompts, filters, generation and the order of batches."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import EOS_ID, byte_tokenizer
from train_fakes import frozen, small_target

from exactspec.cli.train import read_setting
from exactspec.errors import CheckpointError, ConfigError
from exactspec.train.data import (
    BatchOrder,
    build_shard,
    join,
    load_shards,
    make_batch,
    pack,
    split_heldout,
    with_anchors,
)
from exactspec.train.generate import BatchGenerator, Job
from exactspec.train.options import DataOptions, make_options
from exactspec.train.prompts import PromptFilter, frame_prompts, openings
from exactspec.train.templates import long_prompt, template_prompts


def greedy_answer(target, prompt, count):
    """The slow way: the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        _, hidden = target.forward(torch.tensor([tokens]), (0,))
        tokens.append(int((hidden[0, -1] @ target.lm_head.t()).argmax()))
        if tokens[-1] == EOS_ID:
            break
    return tokens[len(prompt) :]


def test_a_cache_beyond_the_memory_is_refused_by_the_setting():
    with pytest.raises(ConfigError, match=r"memory_tokens: .* 1099511627776 slots"):
        BatchGenerator(frozen(small_target()), [EOS_ID], slots=2**40, length=32)


def test_slots_give_what_one_sequence_at_a_time_gives():
    """More jobs than slots, of unlike lengths: slots are refilled and old content must not leak."""
    target = frozen(small_target())
    rng = random.Random(0)
    jobs = [
        Job(tuple(rng.randrange(256) for _ in range(rng.randint(1, 12))), rng.randint(1, 14), 0.0, i) for i in range(11)
    ]
    answers = BatchGenerator(target, [EOS_ID], slots=3, length=32).run(jobs)
    for job, answer in zip(jobs, answers, strict=True):
        assert answer == greedy_answer(target, job.prompt, job.max_new)


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_slot():
    target = frozen(small_target())
    jobs = [Job((65 + i % 2, 66), 12, 1.0, i // 2, min_p=0.01) for i in range(8)]
    many = BatchGenerator(target, [EOS_ID], slots=8, length=32).run(jobs)
    few = BatchGenerator(target, [EOS_ID], slots=2, length=40).run(list(reversed(jobs)))
    assert many == list(reversed(few))
    assert len({tuple(answer) for answer in many}) > 4


def test_generation_stops_at_the_end_token_and_keeps_it():
    loaded = small_target()
    loaded.weights.lm_head[EOS_ID] = loaded.weights.lm_head[:256].sum(0)
    target = frozen(loaded)
    answers = BatchGenerator(target, [EOS_ID], slots=4, length=64).run([Job((i,), 60, 1.0, i) for i in range(12)])
    ended = [answer for answer in answers if EOS_ID in answer]
    assert ended
    assert all(answer.index(EOS_ID) == len(answer) - 1 for answer in ended)
    assert all(len(answer) == 60 for answer in answers if EOS_ID not in answer)


def test_a_job_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"slot_tokens: a job of 3 \+ 30 tokens does not fit 32"):
        BatchGenerator(frozen(small_target()), [EOS_ID], 2, 32).run([Job((1, 2, 3), 30, 0.0, 0)])


def test_prompts_that_overlap_with_excluded_ones_are_dropped():
    unseen = ["A farmer has 12 cows, and every cow gives 9 litres of milk a day.", "Name two fish"]
    keep = PromptFilter(unseen, words=8).keep
    assert not keep("Tell me: every cow gives 9 litres of milk a day; is that a lot?")  # 8 words in a row
    assert keep("Tell me: every cow gives 9 litres of cream a day; is that a lot?")
    assert not keep("Name two FISH!")  # shorter than the window: equal as a whole
    assert keep("Name two fish that live in cold rivers")


def test_repetition_and_near_duplicates_are_dropped_and_counted():
    chosen = PromptFilter()
    assert chosen.keep("Solve 3 x + 7 = 22 for x please")
    assert not chosen.keep("Solve 5 x + 9 = 14 for x please.")  # the same but for numbers
    assert chosen.keep("Solve 5 x + 9 = 14 for x please.", own_repetition=False)  # templates: numbers count
    assert not chosen.keep("and then " * 30)
    assert not chosen.keep("Hi")
    assert chosen.dropped["repetitive"] == 1
    assert chosen.dropped["too short"] == 1


def test_templates_are_varied_and_seeded():
    prompts = template_prompts(600, 5)
    assert prompts == template_prompts(600, 5)
    assert prompts != template_prompts(600, 6)
    assert len(set(prompts)) > 500
    assert any("```python" in p for p in prompts)
    assert any("\\boxed" in p for p in prompts)
    long = long_prompt(random.Random(0), ["first " * 50, "second " * 50])
    assert "first" in long
    assert "second" in long


def test_prompts_are_framed_by_the_chat_template():
    tokenizer = byte_tokenizer()
    framed = frame_prompts(tokenizer, ["hello"] * 30, 0)
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert plain in framed
    assert len({tuple(ids) for ids in framed}) > 2  # some with system messages
    begun, starts = openings(tokenizer, 20, 0)
    user = tokenizer.encode("<user>", add_special_tokens=False)[0]
    for ids, start in zip(begun, starts, strict=True):
        assert tokenizer.decode(ids[len(ids) - ids[::-1].index(user) :]) == start


def test_batches_cover_every_sequence_once_an_epoch_and_resume_anywhere():
    lengths = torch.tensor(np.random.default_rng(0).integers(10, 400, 103))
    order = BatchOrder(lengths, batch_sequences=8, batch_tokens=1024, seed=3)
    epoch = order.epoch(0)
    assert sorted(i for batch in epoch for i in batch) == list(range(103))
    for batch in epoch:
        width = -(-int(lengths[batch].max()) // 64) * 64
        assert len(batch) <= 8
        assert len(batch) == 1 or len(batch) * width <= 1024
    stream = order.batches(0)
    whole = [next(stream) for _ in range(3 * len(epoch))]
    later = order.batches(17)
    assert [next(later) for _ in range(10)] == whole[17:27]
    assert whole[: len(epoch)] != whole[len(epoch) : 2 * len(epoch)]


def test_ranks_share_the_batches_between_them():
    lengths = torch.full((40,), 60)
    whole = BatchOrder(lengths, 4, 1024, 0).batches(0)
    ranks = [BatchOrder(lengths, 4, 1024, 0, rank, 2).batches(0) for rank in range(2)]
    for _ in range(12):
        assert [next(ranks[0]), next(ranks[1])] == [next(whole), next(whole)]


def test_packing_joining_and_cutting():
    one, two = pack([[1, 2, 3], [4, 5]], [1, 1]), pack([[6, 7, 8, 9]], [2])
    both = join([one, two])
    assert [both.row(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert both.num_answer_tokens == 2 + 1 + 2
    assert both.subset([2, 0]).row(0).tolist() == [6, 7, 8, 9]
    batch = make_batch(both, [0, 2], max_sequence=3)
    assert batch.token_ids.shape == (2, 64)
    assert batch.lengths.tolist() == [3, 3]
    training, heldout = split_heldout(200, 0.1, 0)
    assert len(heldout) == 20
    assert sorted(training + heldout) == list(range(200))


def test_a_damaged_data_file_is_named(tmp_path):
    (tmp_path / "sequences-0-of-1.safetensors").write_bytes(b"not much")
    with pytest.raises(CheckpointError, match=r"sequences-0-of-1\.safetensors: not a whole file"):
        load_shards(tmp_path, 1)


def test_settings_are_sorted_into_their_places_and_unknown_ones_named(tmp_path):
    options = make_options("m", "dspark", tmp_path, steps=5, max_answer=9, seed=2)
    assert (options.recipe.steps, options.data.max_answer, options.seed) == (5, 9, 2)
    with pytest.raises(ConfigError, match="'stepps' is not a setting"):
        make_options("m", "dspark", tmp_path, stepps=5)
    with pytest.raises(ConfigError, match="algorithm: 'medusa' is not one of dspark, dflash"):
        make_options("m", "medusa", tmp_path)
    assert make_options("m", "dspark", tmp_path, data_folder="elsewhere").data_path == Path("elsewhere")


def test_shares_of_temperatures_are_read_from_the_command_line(tmp_path):
    shares = read_setting("0.6:1.0,0.4:0")
    assert make_options("m", "dspark", tmp_path, temperatures=shares).data.temperatures == ((0.6, 1.0), (0.4, 0))
    assert read_setting("1:0.7,") == ((1, 0.7),)
    assert read_setting("C:/drafts") == "C:/drafts"


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("gamma", 0, "gamma: must be at least 1, got 0"),
        ("num_layers", "x", "num_layers: must be an integer, got 'x'"),
        ("steps", 1.5, "steps: must be an integer, got 1.5"),
        ("num_anchors", True, "num_anchors: must be an integer, got True"),
        ("max_sequence", 1, "max_sequence: must be at least 4, got 1"),
        ("adam_lr", -1.0, "adam_lr: must be at least 0, got -1.0"),
        ("loss_decay", 0, "loss_decay: must be above 0, got 0"),
        ("muon_lr", float("nan"), "muon_lr: must be a finite number, got nan"),
        ("heldout_share", 1.0, "heldout_share: must be below 1, got 1.0"),
        ("log_every", 0, "log_every: must be at least 1, got 0"),
        ("max_seconds", 0, "max_seconds: must be above 0, got 0"),
        ("seed", -1, "seed: must be at least 0, got -1"),
        ("target_layer_ids", "x", "target_layer_ids: must be values with commas between, got 'x'"),
        ("temperatures", ((0, 1.0),), "temperatures: one share at least must be above 0"),
        ("temperatures", (), "temperatures: one share at least must be above 0"),
        ("sample_from_anchor", False, "sample_from_anchor: dspark and its published layout fix it"),
        ("resume", 1, "resume: must be true or false, got 1"),
        ("temperatures", (0.6, 1.0), "temperatures: must be pairs share:temperature, .* got 0.6"),
    ],
)
def test_settings_are_checked_before_anything_runs(setting, value, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        make_options("m", "dspark", tmp_path, **{setting: value})


def test_sequences_without_an_anchor_are_left_out():
    """Cut to max_sequence, a long prompt leaves nothing of its answer: a batch of such sequences has no rows."""
    rows = pack([[1] * 4 + [2, 3], [1] * 9 + [2, 3], [1] * 3 + [2]], [4, 9, 3])
    both = join([rows, rows])
    kept = with_anchors(both, max_sequence=8)
    assert [kept.row(i).tolist() for i in range(len(kept))] == [[1, 1, 1, 1, 2, 3]] * 2
    assert with_anchors(kept, 8) is kept
    with pytest.raises(ConfigError, match=r"1 of 3 sequences .* max_sequence \(8\); at least 2 are needed"):
        with_anchors(rows, max_sequence=8)


@pytest.mark.parametrize("changes", [{"context_length": 200, "max_context": 200}, {"windows": (None, 200, None, 200)}])
def test_data_stay_within_the_context_and_the_window_of_the_target(changes, tmp_path):
    """Prompts that leave no room for an answer are left out and counted; where none can fit the setting is named."""
    loaded = small_target(**changes)
    lines = [json.dumps({"prompt": f"{'what about that ' * repeats}number {repeats}"}) for repeats in (1, 2, 3, 15, 20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = DataOptions(prompts=tmp_path / "prompts.jsonl", max_answer=20, slots=4)
    build_shard(loaded, frozen(loaded), options, 0, tmp_path / "data", 0, 1)
    made = load_shards(tmp_path / "data", 1)
    assert 1 <= len(made) <= 3
    assert int(made.lengths.max()) <= 200
    facts = json.loads((tmp_path / "data" / "sequences-0-of-1.json").read_text())
    assert facts["dropped"]["too long"] >= 2
    own = DataOptions(num_self_prompts=3, num_template_prompts=40, num_long_prompts=0, max_answer=20, slots=4)
    build_shard(loaded, frozen(loaded), own, 0, tmp_path / "own", 0, 1)
    assert int(load_shards(tmp_path / "own", 1).lengths.max()) <= 200
    with pytest.raises(ConfigError, match=r"max_answer: 320 leaves no room for a prompt: .* is 200 tokens"):
        build_shard(loaded, frozen(loaded), DataOptions(), 0, tmp_path / "none", 0, 1)
