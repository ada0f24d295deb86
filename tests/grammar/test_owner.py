"""The mask owner against a naive truth: a fresh matcher for every prefix, and Python's own `re` and `json`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.errors import RequestError
from exactspec.grammar import GrammarCompiler, MaskOwner, check_grammar, needs_grammar
from exactspec.grammar.schema import written_out
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


@pytest.mark.parametrize("schema", [{"maxLength": 4}, {"minLength": 2}, {"minLength": 2, "maxLength": 4}], ids=str)
def test_strings_of_a_given_length_are_json_strings(schema: dict[str, int]) -> None:
    """Raw control characters never come."""
    inside = ["ab", "é€😀", "a]}", "abcd"]
    for text in inside:
        assert walk(owner(json_schema=json.dumps({"type": "string"} | schema)), f'"{text}"'), text
    for text in ["a\tb", "a\x01b", "a\x1fb", "a\nb", 'a"b', "a\\", *["abcde"] * ("maxLength" in schema)]:
        assert not walk(owner(json_schema=json.dumps({"type": "string"} | schema)), f'"{text}"'), text
    nested = {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "string"} | schema}
    assert walk(owner(json_schema=json.dumps(nested)), '{"é ": "a b"}')
    assert not walk(owner(json_schema=json.dumps(nested)), '{"\t": "ab"}')
    for one in ({"maxLength": 1}, {"minLength": 1, "maxLength": 1}):
        assert walk(owner(json_schema=json.dumps({"type": "string"} | one)), '"€"')
        assert not walk(owner(json_schema=json.dumps({"type": "string"} | one)), '"\t"')


KEPT: list[dict[str, Any]] = [
    {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "description": "a number", "default": 3},
    {"type": "string", "enum": ["a", "b"], "title": "x"}, {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "number", "const": 3}, {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    {"type": "number", "anyOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    {"allOf": [{"type": "integer"}]}, {"type": "integer", "multipleOf": 3}, {"type": "array", "uniqueItems": False},
    {"type": "object", "properties": {"not": {"type": "integer"}, "$ref": {"type": "null"}}, "required": ["not"]},
    {"properties": {"a": {"type": "string"}}, "required": ["a"], "minProperties": 1}, {"format": "odd", "x-note": 1},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "boolean"}}, "discriminator": {}},
]  # fmt: skip


@pytest.mark.parametrize("schema", KEPT, ids=str)
def test_annotations_and_properties_of_any_name_are_free(schema: dict[str, Any]) -> None:
    assert owner(json_schema=json.dumps(schema)).can_start


DROPPED: list[tuple[str, dict[str, Any]]] = [
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}), ("not", {"not": {"type": "integer"}}),
    ("if", {"if": {"type": "integer"}, "then": {"minimum": 5}}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 5}}), ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("minimum", {"minimum": 3}), ("maxLength", {"maxLength": 2}), ("required", {"required": ["a"]}),
    ("required", {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z"]}),
    ("properties", {"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["a"]}]}),
    ("type", {"type": "integer", "anyOf": [{"minimum": 3}]}), ("oneOf", {"anyOf": [{}], "oneOf": [{"type": "null"}]}),
    ("minimum", {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3}),
    ("minimum", {"enum": [1, 2, 3], "minimum": 2}), ("type", {"type": "integer", "enum": [1, "a"]}),
    ("maxLength", {"type": "string", "pattern": "^[ab]*$", "maxLength": 2}), ("anyOf", {"anyOf": []}),
    ("minLength", {"type": "string", "format": "uri", "minLength": 3}),
    ("patternProperties", {"type": "object", "properties": {"ab": {}}, "patternProperties": {"b": {"type": "null"}}}),
    ("propertyNames", {"type": "object", "patternProperties": {"a": {}}, "propertyNames": {"pattern": "b"}}),
]  # fmt: skip


@pytest.mark.parametrize(("word", "schema"), DROPPED, ids=str)
def test_what_the_compiler_would_drop_is_refused_by_place_and_name(word: str, schema: dict[str, Any]) -> None:
    """Served, each of these would give outputs that break its schema."""
    inside = {"type": "object", "properties": {"p": {"type": "array", "items": {"$ref": "#/$defs/deep/~1/q"}}}}
    for whole, place in (
        (schema, "#"),
        ({"type": "array", "prefixItems": [{}, schema]} | {"$defs": schema.get("$defs", {})}, "#/prefixItems/1"),
        (inside | {"$defs": {**schema.get("$defs", {}), "deep": {"/": {"q": schema}}}}, "#/$defs/deep/~1/q"),
    ):
        with pytest.raises(RequestError, match=f"^json_schema: {word} at {re.escape(place)} ") as caught:
            check_grammar(SamplingParams(json_schema=json.dumps(whole)))
        assert caught.value.field == "json_schema"
    unused = {"type": "integer", "$defs": {**schema.get("$defs", {}), "unused": schema}}
    check_grammar(SamplingParams(json_schema=json.dumps(unused)))


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
        ("regex", "(?=a)b", "not supported"),
        ("ebnf", "root = a", "does not compile"),
        ("ebnf", "root ::= root", "no finite text"),
    ],
)
def test_bad_grammars_are_refused_by_name(field: str, text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        owner(**{field: text})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0), ("abc", 3), ("a{3}", 3), ("a{2,5}b*", 6), ("(ab){0,10}", 20), ("((a{9}b){2}c){3}", 63),
        ("[a-z]{4,}", 4), (r"\[a\]{3}", 5), (r"[^\]{5}]{2}", 2), ("[]{9}]{2}", 2), (r"\{3}", 3), ("(a|b)?{7}", 14),
        ("a)b{2}", 3), ("{3}", 0), ("a{" + "9" * 5000 + "}", 10**9),
    ],
)  # fmt: skip
def test_the_size_of_a_pattern_with_its_repeats_written_out(pattern: str, size: int) -> None:
    assert written_out(pattern) == size


def test_patterns_that_count_too_far_are_refused_before_they_occupy_the_compiler() -> None:
    """One of these takes minutes, and nobody's grammar would be compiled while two of them are."""
    for pattern in ("[a-z]{0,30000}", "([a-z]{0,200}x){0,200}", "(((a{9}){99}){99}){99}"):
        for schema in ({"type": "string", "pattern": pattern}, {"patternProperties": {pattern: {"type": "null"}}}):
            with pytest.raises(RequestError, match="pattern at #/items is too large"):
                check_grammar(SamplingParams(json_schema=json.dumps({"type": "array", "items": schema})))
    many = {"properties": {f"p{i}": {"type": "string", "pattern": "a{0,2500}"} for i in range(20)}}
    with pytest.raises(RequestError, match="too large"):
        check_grammar(SamplingParams(json_schema=json.dumps(many)))
    assert owner(json_schema='{"type": "string", "pattern": "^(\\\\w{1,12} ){1,12}$"}').can_start


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
    assert needs_grammar(SamplingParams(ebnf='root ::= "a"'))
    check_grammar(SamplingParams())
