"""Token bytes of both families of tokenizers, chat templates, special tokens."""

from __future__ import annotations

import json

import pytest
from fakes import EOS_ID, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from exactspec.errors import CheckpointError, RequestError
from exactspec.model.gguf_tokenizer import make_hf_tokenizer
from exactspec.text.tokenizer import Tokenizer


def sentencepiece_tokenizer(**metadata):
    """A small vocabulary in the style of Llama 2: space marks, byte tokens, scores for the merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ello", "▁hello", "ä", "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 4]
    fields = {
        "model": "llama", "tokens": tokens, "scores": [-float(i) for i in range(len(tokens))], "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    full = {f"tokenizer.ggml.{k}": v for k, v in (fields | metadata).items()} | {"general.architecture": "llama"}
    return Tokenizer(make_hf_tokenizer(full, "test.gguf"))


BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_bytes_join_to_the_text(text):
    tokenizer = BYTES
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_an_emoji_is_four_tokens_of_one_byte(tokenizer):
    ids = tokenizer.encode("😀")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert tokenizer.decode(ids[:2]) == "�"
    assert tokenizer.decode(ids) == "😀"


def test_all_256_bytes_have_a_token(tokenizer):
    assert sorted(tokenizer.all_token_bytes[:256]) == [bytes([b]) for b in range(256)]


def test_special_tokens_stand_for_their_text(tokenizer):
    assert tokenizer.token_bytes(EOS_ID) == b"<eos>"
    assert tokenizer.is_special(EOS_ID)
    assert not tokenizer.is_special(0)
    ids = [*tokenizer.encode("a"), EOS_ID, *tokenizer.encode("b")]
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)) == ("ab", "a<eos>b")


def test_ids_without_a_token_are_nothing(tokenizer):
    for padded in (262, 10_000, -1):
        assert tokenizer.token_bytes(padded) == b""
        assert tokenizer.decode([*tokenizer.encode("a"), padded]) == "a"


def test_sentencepiece_bytes(pieces):
    ids = pieces.encode("hello ähello\n", add_special_tokens=False)
    assert b"".join(map(pieces.token_bytes, ids)) == " hello ähello\n".encode()
    assert pieces.token_bytes(pieces.hf.convert_tokens_to_ids("▁hello")) == b" hello"
    assert pieces.token_bytes(pieces.hf.convert_tokens_to_ids("<0xE2>")) == b"\xe2"
    assert pieces.decode(ids) == "hello ähello\n"


def test_sentencepiece_falls_back_to_bytes(pieces):
    ids = pieces.encode("😀", add_special_tokens=False)
    assert [pieces.token_bytes(i) for i in ids] == [b" ", b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_sentencepiece_merges_in_the_order_of_the_scores(pieces):
    assert pieces.hf.convert_ids_to_tokens(pieces.encode("hello hel")) == ["<s>", "▁hello", "▁h", "el"]


def test_user_defined_tokens_are_whole_but_not_special(pieces):
    tool = pieces.hf.convert_tokens_to_ids("<tool>")
    assert tool in pieces.encode("hello<tool>")
    assert not pieces.is_special(tool)
    assert pieces.token_bytes(tool) == b"<tool>"


def test_bos_only_where_the_file_says_so():
    assert sentencepiece_tokenizer().encode("h")[0] == 1
    assert 1 not in sentencepiece_tokenizer(add_bos_token=False).encode("h")
    assert sentencepiece_tokenizer(add_eos_token=True).encode("h")[-1] == 2


def test_a_chat_adds_no_special_tokens_of_its_own(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode("<user>hi<eos><assistant>", False)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == tokenizer.encode(
        "<user>hi<eos>", False
    )


def test_a_final_message_can_be_continued(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    text = tokenizer.render_chat_template(messages, continue_final_message=True)
    assert text == "<user>hi<eos><assistant>Well, "


def test_tools_and_other_fields_reach_the_template(tokenizer):
    template = "{{ tools[0]['function']['name'] }} {{ mood }}"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text = tokenizer.render_chat_template(
        [{"role": "user", "content": ""}], chat_template=template, tools=tools, mood="calm"
    )
    assert text == "weather calm"


def test_no_template_and_a_template_that_refuses(tokenizer):
    with pytest.raises(RequestError, match="messages: this model has no chat template"):
        byte_tokenizer(chat_template=None).apply_chat_template([{"role": "user", "content": "hi"}])
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="messages: the chat template refuses them: roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=strict)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        backend_tokenizer = None

    with pytest.raises(CheckpointError, match="not a fast one"):
        Tokenizer(Slow())


def test_a_hole_in_the_ids_hides_no_token():
    """The number of tokens is no bound of their ids."""
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(BYTES.hf.backend_tokenizer.to_str())
    state["model"]["vocab"]["b"] = 300
    hf = PreTrainedTokenizerFast(tokenizer_object=RustTokenizer.from_str(json.dumps(state)), eos_token="<eos>")
    hole = BYTES.encode("b")[0]
    holed = Tokenizer(hf)
    ids = holed.encode("abc")
    assert (ids[1], holed.vocab_size, len(holed.all_token_bytes)) == (300, 301, 301)
    assert (holed.decode(ids), holed.token_bytes(300)) == ("abc", b"b")
    assert (holed.token_bytes(hole), holed.decode([hole])) == (b"", "")
