"""The mask owner against a naive truth: a fresh matcher for every prefix, and Python's own `re` and `json`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.errors import RequestError
from exactspec.grammar import GrammarCompiler, MaskOwner, check_grammar, needs_grammar
from exactspec.types import SamplingParams


class Bytes:
    """One token per byte, some longer pieces, two special tokens; logits are wider than the vocabulary."""

    pieces = (b"ab", b"abc", b'{"', b'":', b"true", b"12", b" ", b"\n")
    eos, other_special = 264, 265

    def __init__(self) -> None:
        self.table = [bytes([b]) for b in range(256)] + list(self.pieces) + [b"<eos>", b"<special>"]
        self.vocab_size = len(self.table)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.eos


VOCAB = Bytes()
WIDTH = 300
EOS = VOCAB.eos
COMPILER = GrammarCompiler(VOCAB, WIDTH, {EOS})

PATTERNS = ["(ab?c)+", "a{2,4}|b", "[abc]*12", "(true|ab)( (true|ab))*"]


def owner(**kwargs: str) -> MaskOwner:
    return COMPILER.owner(SamplingParams(**kwargs))  # type: ignore[arg-type]


def naive_mask(committed: Sequence[int], **kwargs: str) -> set[int] | None:
    """Allowed ids after `committed`, from a matcher that never steps back; None past the end or where it is illegal."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(COMPILER.compile(SamplingParams(**kwargs)))  # type: ignore[arg-type]
    bits = xgrammar.allocate_token_bitmask(1, WIDTH)
    for token in committed:
        if token not in _allowed(matcher, bits) or not matcher.accept_token(token) or matcher.is_terminated():
            return None
    return _allowed(matcher, bits)


def _allowed(matcher: object, bits: torch.Tensor) -> set[int]:
    matcher.fill_next_token_bitmask(bits)  # type: ignore[attr-defined]
    return {i for i in range(WIDTH) if int(bits[0, i // 32]) >> (i % 32) & 1}


def ids_of(row: torch.Tensor) -> set[int]:
    return set(row.nonzero().flatten().tolist())


tokens = st.lists(st.sampled_from([*map(ord, "abc12"), 256, 257, 260, 261, 262, EOS, EOS + 1]), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATTERNS), st.lists(st.tuples(tokens, st.integers(0, 7)), max_size=5), st.randoms())
def test_masks_along_any_drafts_equal_matching_every_prefix_anew(pattern: str, rounds: list, rng: object) -> None:
    """Rounds of: propose a block, look at all its masks, commit a legal part of it and one legal token."""
    mask_owner, committed = owner(regex=pattern), []
    for drafts, keep in rounds:
        rows = mask_owner.masks(drafts)
        assert rows.shape == (len(drafts) + 1, WIDTH)
        assert rows.any(dim=1).all()
        truths = [naive_mask(committed + drafts[:j], regex=pattern) for j in range(len(drafts) + 1)]
        for row, truth in zip(rows, truths, strict=True):
            if truth is None:
                break
            assert ids_of(row) == truth
        legal = next((j for j, truth in enumerate(truths) if truth is None), len(truths)) - 1
        step = drafts[: min(keep, legal)]
        if len(step) == legal and (choices := sorted(truths[legal] - {EOS})):
            step = [*step, rng.choice(choices)]  # type: ignore[attr-defined]
        mask_owner.advance(step)
        committed += step
        assert not mask_owner.terminated


@settings(max_examples=60, deadline=None)
@given(st.text("abc12", max_size=8), st.sampled_from(["(ab?c)+", "a{2,4}|b", "[abc]*12"]), st.sampled_from("^$^ "))
def test_a_regex_allows_eos_exactly_where_python_matches(text: str, pattern: str, anchor: str) -> None:
    written = {"^": "^" + pattern, "$": pattern + "$", " ": pattern}[anchor]
    mask_owner = owner(regex=f"({pattern})" if anchor == " " else written if "|" not in written else pattern)
    for char in text:
        if not mask_owner.mask_after([])[ord(char)]:
            assert re.fullmatch(pattern, text) is None
            return
        mask_owner.advance([ord(char)])
    assert bool(mask_owner.mask_after([])[EOS]) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize("length", range(1, 9))
def test_eos_at_every_place_of_a_block(length: int) -> None:
    """No matcher is asked past its end, and a rejected EOS leaves the grammar going."""
    mask_owner = owner(regex=f"a{{{length},20}}")
    block = [ord("a")] * length + [EOS] + [ord("b")] * (8 - length)
    rows = mask_owner.masks(block)
    assert ids_of(rows[length]) == {ord("a"), EOS}
    assert all(ids_of(row) == {EOS} for row in rows[length + 1 :])
    mask_owner.advance([ord("a")] * length)  # the EOS was rejected: another a was drawn
    mask_owner.advance([ord("a")])
    assert not mask_owner.terminated
    assert mask_owner.completed
    mask_owner.masks([EOS])
    mask_owner.advance([EOS])
    assert mask_owner.terminated
    assert ids_of(mask_owner.mask_after([])) == {EOS}
    assert all(ids_of(row) == {EOS} for row in mask_owner.masks([ord("a"), EOS]))
    mask_owner.advance([ord("a")])  # looked at by nobody


def test_eos_is_forbidden_until_the_end_and_only_eos_after_it() -> None:
    mask_owner = owner(regex="abc")
    assert not mask_owner.mask_after([])[EOS]
    assert ids_of(mask_owner.mask_after([257])) == {EOS}  # the piece "abc"
    assert ids_of(mask_owner.masks([EOS])[0]) == {ord("a"), 256, 257}


def test_special_and_padding_tokens_are_never_allowed() -> None:
    mask = owner(regex="(.|\n)*").mask_after([])
    assert not mask[VOCAB.other_special]
    assert not mask[VOCAB.vocab_size :].any()
    assert mask[ord("<")]


def test_an_illegal_commit_ends_the_output() -> None:
    mask_owner = owner(regex="abc")
    mask_owner.advance([ord("z")])
    assert mask_owner.terminated


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[\\w]+$"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def walk(mask_owner: MaskOwner, text: str) -> bool:
    """Feeds bytes; False where the grammar forbids one. At the end: is EOS allowed?"""
    for byte in text.encode():
        if not mask_owner.mask_after([])[byte]:
            return False
        mask_owner.advance([byte])
    return bool(mask_owner.mask_after([])[EOS])


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name": "ab_1", "n": 12}', True),
        ('{ "name":"x",\n  "n" : -3 }', True),
        ('{"name": "a b", "n": 1}', False),
        ('{"name": "ab"}', False),
        ('{"name": "ab", "n": 1.5}', False),
        ('{"name": "ab", "n": 1, "more": 1}', False),
        ('{"name": "ab", "n": 1', False),
    ],
)
def test_json_schema_honours_what_it_says(text: str, valid: bool) -> None:
    assert walk(owner(json_schema=json.dumps(SCHEMA)), text) is valid


def test_any_json_object() -> None:
    for text, valid in (('{"a": [1, {"b": null}], "c": "x"}', True), ("{}", True), ("[1]", False), ("12", False)):
        assert walk(owner(json_schema='{"type": "object"}'), text) is valid


def test_ebnf() -> None:
    grammar = 'root ::= greeting " " name\ngreeting ::= "Hi" | "Hello"\nname ::= [a-z]+ ("!" | "?")?'
    for text, valid in (("Hi bob", True), ("Hello ann!", True), ("Hello", False), ("Hey bob", False)):
        assert walk(owner(ebnf=grammar), text) is valid


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("json_schema", "INVALID", "not JSON"),
        ("json_schema", "12", "must be a JSON object"),
        ("json_schema", '{"type": "nonsense"}', "does not compile"),
        ("json_schema", '{"$ref": "http://example.org/x"}', "outside the schema"),
        ("json_schema", "[" * 5000, "not JSON"),
        ("json_schema", '{"type":"array","items":' * 70 + "{}" + "}" * 70, "nested"),
        ("json_schema", '{"enum": ["' + "x" * 70_000 + '"]}', "at most"),
        ("regex", "(a", "does not compile"),
        ("regex", "(?=a)b", "does not compile"),
        ("ebnf", "root = a", "does not compile"),
        ("ebnf", "root ::= root", "matches nothing"),
    ],
)
def test_bad_grammars_are_refused_by_name(field: str, text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        owner(**{field: text})
    assert caught.value.field == field


def test_anchors_are_tolerated_and_an_escaped_dollar_is_a_dollar() -> None:
    assert walk(owner(regex="^ab$"), "ab")
    assert walk(owner(regex=r"a\$"), "a$")
    assert walk(owner(regex=r"a\\$"), "a\\")


def test_the_cache_is_shared_and_bounded() -> None:
    compiler = GrammarCompiler(VOCAB, WIDTH, {EOS}, max_cached=3)
    first = compiler.compile(SamplingParams(regex="a"))
    assert compiler.compile(SamplingParams(regex="a")) is first
    for i in range(9):
        compiler.compile(SamplingParams(regex=f"a{{{i + 1}}}"))
    assert compiler.num_cached <= 3
    assert compiler.compile(SamplingParams(regex="a")) is not first


def test_compiling_happens_in_the_background_and_has_a_time_limit() -> None:
    compiler = GrammarCompiler(VOCAB, WIDTH, {EOS}, timeout_s=0.01)
    slow = "|".join("a" * i for i in range(1, 180))
    future = compiler.prepare(SamplingParams(regex=slow))
    with pytest.raises(RequestError, match="took more than"):
        compiler.compile(SamplingParams(regex=slow))
    assert future.result(60) is compiler.prepare(SamplingParams(regex=slow)).result(0)


def test_what_needs_a_grammar() -> None:
    assert not needs_grammar(SamplingParams())
    assert not needs_grammar(SamplingParams(regex=""))
    assert needs_grammar(SamplingParams(ebnf='root ::= "a"'))
    check_grammar(SamplingParams())
