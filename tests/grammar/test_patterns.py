"""Patterns against Python's own `re` and `json`: what comes through is JSON and matches, or the pattern is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from test_owner import EOS, WIDTH, Bytes, owner, walk

from exactspec.errors import RequestError
from exactspec.grammar import GrammarCompiler
from exactspec.grammar.patterns import in_ascii, misread, without_newlines
from exactspec.types import SamplingParams

# (pattern, what must come through, with everything else that the alphabet gives left to `re` and `json`)
SERVED = [
    ("^é[^x]$", ["éa", "éé", "é "]),
    ("^[^é]$", ["a", "😀"]),
    ("^[à-ÿ]+$", ["é", "éé"]),
    ("^😀.$", ["😀a", "😀é"]),
    (r"^\ud83d\ude00$", ["😀"]),
    (r"^[\é\\]$", ["é"]),
    ("^a.$", ["aa", "aé", "a "]),
    (r"^(a|\n)$", ["a"]),
    (r"^\s$", [" "]),
    (r"^[^\n]$", ["a", "é", " "]),
    (r"^(a|\t\")?é*$", ["", "a", "éé", "aé"]),
    ("^(a$|é$)", ["a", "é"]),
]
REFUSED = [
    *((pattern, "escapes") for pattern in (r"^a\nb$", "^\n$", r"^[\x00-\x1f]$", '^"$', r"^\\$", r"^(\n|é\t)$")),
    ("(?=a)a", r"\(\?="), ("(?!a).", r"\(\?!"), (r"^a\Z", r"\\Z"), (r"[\A]", r"\\A"), ("a++", "possessive"),
    *((pattern, "ends only") for pattern in ("^a$b", "a^b", "(^a){2}", "(a$)b")),
    *((pattern, "surrogate") for pattern in (r"\ud800", "\ud800", r"[\ud800-\udfff]")),
]  # fmt: skip
ALPHABET = ["a", "b", "x", "é", "😀", " ", "\n", "\t", '"', "\\", "\x00"]


@pytest.mark.parametrize(("pattern", "wanted"), SERVED)
@pytest.mark.parametrize("more", [{}, {"minLength": 1}])
def test_strings_with_a_pattern_are_json_and_match(pattern: str, wanted: list[str], more: dict[str, int]) -> None:
    """Beside a string with a length the grammar is written out and read again: that may change nothing."""
    one = {"type": "string", "pattern": pattern}
    schema = {"type": "array", "prefixItems": [one, {"type": "string"} | more], "minItems": 2, "maxItems": 2}
    text = json.dumps(schema, ensure_ascii="ud8" in pattern)
    through = []
    for letters in itertools.chain.from_iterable(itertools.product(ALPHABET, repeat=n) for n in range(3)):
        document = f'["{"".join(letters)}","b"]'
        if walk(owner(json_schema=text), document):
            through.append(json.loads(document)[0])
            assert re.search(pattern.replace(r"\ud83d\ude00", "😀"), through[-1])
    assert set(wanted) <= set(through)


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in SERVED if "ud8" not in pattern])
@pytest.mark.parametrize("place", ["pattern", "patternProperties", "propertyNames"])
def test_whatever_is_drawn_is_json_and_matches(pattern: str, place: str) -> None:
    """Random walks through the masks, over the bytes of the alphabet where these are allowed."""
    schema: dict[str, Any] = {"type": "string", "pattern": pattern}
    if place == "patternProperties":
        schema = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    elif place == "propertyNames":
        schema = {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": {"type": "null"}}
    chance, likely = random.Random(pattern + place), {*"".join(ALPHABET).encode()}
    for _ in range(20):
        drawn, said = owner(json_schema=json.dumps({"type": "array", "items": schema})), b""
        while EOS not in (allowed := drawn.mask_after([]).nonzero().flatten().tolist()):
            letters = [i for i in allowed if i < 256]
            closing = [i for i in letters if i in b'"}]'] if chance.random() < 0.02 * len(said) else []
            said += bytes([chance.choice(closing or [i for i in letters if i in likely] or letters)])
            drawn.advance([said[-1]])
        for value in json.loads(said.decode()):
            assert all(re.search(pattern, text) for text in ([value] if place == "pattern" else value)), said


@pytest.mark.parametrize(("pattern", "words"), REFUSED)
def test_a_pattern_that_would_be_misread_is_refused(pattern: str, words: str) -> None:
    for schema in ({"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: {}}}):
        with pytest.raises(RequestError, match=words) as caught:
            owner(json_schema=json.dumps({"type": "array", "items": schema}))
        assert caught.value.field == "json_schema"
        assert caught.value.reason.startswith(f"pattern {pattern!r} at #/items")


def test_a_regex_is_not_in_json_and_a_dot_is_no_line_feed() -> None:
    assert walk(owner(regex=r'^"\t\\é$'), '"\t\\é')
    for pattern in (".", "a.b", r"\.", "[.]", "[^.]", "é.", r"[\].]", r"\\."):
        for letters in itertools.chain.from_iterable(itertools.product("a.b\n]é\\", repeat=n) for n in (1, 2, 3)):
            text = "".join(letters)
            assert walk(owner(regex=pattern), text) == (re.fullmatch(pattern, text) is not None), (pattern, text)
    for pattern in ("(?=a)a", r"a\Z", "a$b", "a*+"):
        with pytest.raises(RequestError, match="regex"):
            owner(regex=pattern)


@pytest.mark.parametrize("grammar", [{"json_schema": '{"type":"array","items":{"type":"string"}}'}, {"regex": "[^a]*"}])
@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_no_mask_lets_out_what_is_no_character(grammar: dict[str, str], drafted: int) -> None:
    """Every first and second byte, committed or drafted, alone or the end of a longer token: as Python decodes it."""

    class Vocabulary(Bytes):
        pieces = (*Bytes.pieces[:4], b"z\xe0", b"\x80\x80", b"\xed\xa0", b"\xed\x9f")

    vocabulary = Vocabulary()
    compiler = GrammarCompiler(vocabulary, WIDTH, {EOS})
    start = [] if "regex" in grammar else [ord("["), ord('"')]
    for first in [*range(0xC2, 0xF5), 260]:
        state = compiler.owner(SamplingParams(**grammar))  # type: ignore[arg-type]
        state.advance((tokens := [*start, first])[: len(tokens) - drafted])
        mask = state.masks(tokens[len(tokens) - drafted :])[-1]
        for second in [*range(0x80, 0xC0), 261]:
            data = vocabulary.token_bytes(first) + vocabulary.token_bytes(second)
            whole = any(_decodes(data + b"\x80" * n) for n in range(3))
            assert bool(mask[second]) == whole, data
    assert not state.masks([])[0][262]
    fresh = compiler.owner(SamplingParams(**grammar))  # type: ignore[arg-type]
    fresh.advance(start)
    assert fresh.mask_after([])[[262, 263]].tolist() == [False, True]


def _decodes(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def test_spellings() -> None:
    assert in_ascii(r"é\é\\é😀") == r"\u00e9\u00e9\\\u00e9\u{1f600}"
    assert in_ascii(r"\uD83D\uDE00 \\ud83d") == r"\u{1f600} \\ud83d"
    assert without_newlines(r"a.[.]\.(?:.)") == r"a[^\n][.]\.(?:[^\n])"
    for pattern in ("^(a|b)$", "^a|b$", "(^a)", "(a$)", "^$", "", "[^^$]", r"\^\$", "^(?:a|^b)", r"\u{1f600}", "a+?"):
        assert misread(pattern) is None, pattern


def test_two_names_of_one_meaning_are_refused() -> None:
    """The compiler gets names in ASCII, where these are one: it would keep the second rule alone."""
    schema = {"type": "object", "patternProperties": {"é": {"type": "null"}, "\\u00e9": {"type": "string"}}}
    with pytest.raises(RequestError, match=r"patternProperties at .* twice"):
        owner(json_schema=json.dumps(schema))
