"""Text appears character by character and never changes its mind."""

import pytest
from byte_vocab import ByteVocab
from hypothesis import given
from hypothesis import strategies as st

from exactspec.text.detokenizer import Detokenizer, decode_all

VOCAB = ByteVocab()
token_lists = st.lists(st.integers(0, VOCAB.vocab_size - 1), max_size=40)


@given(token_lists, st.lists(st.integers(1, 5), min_size=40, max_size=40), st.booleans())
def test_any_grouping_equals_the_full_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(VOCAB, skip)
    shown, at = "", 0
    for size in sizes:
        shown += detokenizer.append(ids[at : at + size])
        at += size
        assert VOCAB.decode(ids[:at], skip).startswith(shown)
    shown += detokenizer.append(ids[at:]) + detokenizer.flush()
    assert shown == VOCAB.decode(ids, skip) == decode_all(VOCAB, ids, skip)


def test_half_a_character_waits_for_its_other_half() -> None:
    detokenizer = Detokenizer(VOCAB)
    first, second = VOCAB.table.index(b"\xe2\x82"), VOCAB.table.index(b"\xac!")
    assert detokenizer.append([first]) == ""
    assert detokenizer.pending == b"\xe2\x82"
    assert detokenizer.append([second]) == "€!"
    assert detokenizer.pending == b""


def test_a_skipped_special_token_does_not_break_a_character() -> None:
    first, second = VOCAB.table.index(b"\xe2\x82"), VOCAB.table.index(b"\xac!")
    ids = [first, VOCAB.end_id, second]
    assert decode_all(VOCAB, ids) == "€!"
    assert decode_all(VOCAB, ids, skip_special_tokens=False) == "�<|end|>�!"


def test_bytes_that_never_become_a_character_end_as_replacement() -> None:
    detokenizer = Detokenizer(VOCAB)
    assert detokenizer.append([0xF0, 0x9F]) == ""
    assert detokenizer.flush() == "�"


@pytest.mark.model
def test_smollm2_text_equals_its_own_decode() -> None:
    import random

    from exactspec.model.loader import load_target

    tokenizer = load_target("smollm2-135m").tokenizer
    rng = random.Random(7)
    text = "naïve café — 価格は€5 😀👩‍👩‍👧\n\n\tdef f(x):  return x"
    for skip in (True, False):
        for _ in range(200):
            ids = tokenizer.encode(text)[rng.randint(0, 9) :] + [rng.randrange(tokenizer.vocab_size) for _ in range(8)]
            rng.shuffle(ids)
            detokenizer = Detokenizer(tokenizer, skip)
            shown = "".join(detokenizer.append([i]) for i in ids) + detokenizer.flush()
            assert shown == tokenizer.decode(ids, skip_special_tokens=skip)
