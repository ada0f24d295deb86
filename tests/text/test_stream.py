"""What a reader of the stream sees is what a reader of the whole answer sees."""

import pytest
from byte_vocab import ByteVocab
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.text.stops import StopChecker
from exactspec.text.stream import TextStream, final_text
from exactspec.types import FinishReason, SamplingParams

VOCAB = ByteVocab()
letters = st.sampled_from([*map(ord, "abcST\n"), 256, 257, 259, 260, 262, 263, 264, 265, VOCAB.end_id])


def generate(ids: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
    """A plain decoder: one token at a time until something ends it."""
    checker = StopChecker(VOCAB, params)
    for index, token_id in enumerate(ids):
        if (matched := checker.append(token_id)) is not None:
            return ids[: index + 1], FinishReason("stop", matched)
        if token_id == VOCAB.end_id:
            return ids[: index + 1], FinishReason("stop", token_id)
    return ids, FinishReason("length")


@settings(max_examples=400)
@given(
    st.lists(letters, max_size=25),
    st.lists(st.text("abcST€\n", min_size=1, max_size=4), max_size=2),
    st.lists(st.integers(1, 6), min_size=25, max_size=25),
    st.booleans(),
    st.booleans(),
)
def test_deltas_add_up_to_the_answer(
    ids: list[int], stops: list[str], sizes: list[int], keep: bool, skip: bool
) -> None:
    params = SamplingParams(stop=stops, no_stop_trim=keep, skip_special_tokens=skip)
    output, finish = generate(ids, params)
    truth = VOCAB.decode(output if keep or finish.matched != VOCAB.end_id else output[:-1], skip)
    if isinstance(finish.matched, str) and not keep:
        truth = truth[: truth.find(finish.matched)]
    stream, at, shown = TextStream(VOCAB, params), 0, ""
    for size in sizes:
        last = at + size >= len(output)
        shown += stream.append(output[at : at + size], finish if last else None)
        assert truth.startswith(shown)
        at += size
        if last:
            break
    assert shown == stream.text == truth == final_text(VOCAB, output, finish, params)


def test_a_possible_stop_is_held_back_until_decided() -> None:
    stream = TextStream(VOCAB, SamplingParams(stop="abc"))
    assert stream.append([ord("x"), ord("a")]) == "x"
    assert stream.append([ord("b")]) == ""
    assert stream.append([ord("d")]) == "abd"
    assert stream.append([256]) == ""
    assert stream.append([ord("c")], FinishReason("stop", "abc")) == ""
    assert stream.text == "xabd"


def test_the_stop_token_goes_unless_it_is_asked_for() -> None:
    finish = FinishReason("stop", VOCAB.end_id)
    ids = [ord("a"), VOCAB.end_id]
    assert final_text(VOCAB, ids, finish, SamplingParams(skip_special_tokens=False)) == "a"
    assert final_text(VOCAB, ids, finish, SamplingParams(skip_special_tokens=False, no_stop_trim=True)) == "a<|end|>"
    assert final_text(VOCAB, ids, finish, SamplingParams(no_stop_trim=True)) == "a"


def test_nothing_follows_the_end() -> None:
    stream = TextStream(VOCAB, SamplingParams())
    stream.append([ord("a")], FinishReason("length"))
    with pytest.raises(ValueError, match="ended"):
        stream.append([ord("b")])
