"""A stop is found at the earliest token that completes it, wherever blocks end."""

import re
import unicodedata

import pytest
import regex
from byte_vocab import ByteVocab
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.errors import RequestError
from exactspec.text.classes import as_re_means
from exactspec.text.stops import SlowPattern, StopChecker, check_stops, held_back, trim
from exactspec.types import SamplingParams

VOCAB = ByteVocab()


def run(ids: list[int], **kwargs: object) -> tuple[int, str] | None:
    """(index of the token that ended the output, what matched)"""
    checker = StopChecker(VOCAB, SamplingParams(**kwargs))  # type: ignore[arg-type]
    for index, token_id in enumerate(ids):
        if (matched := checker.append(token_id)) is not None:
            return index, matched
    return None


def certain_text(ids: list[int]) -> str:
    """All text of a sequence except an unfinished character at its end."""
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(
        b"".join(VOCAB.token_bytes(i) for i in ids if not VOCAB.is_special(i))
    )


letters = st.sampled_from([ord("a"), ord("b"), ord("c"), 256, 257, 259, 260, 263, 265, ord("S"), VOCAB.end_id])
stop_lists = st.lists(st.text("abcST€!", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


@settings(max_examples=300)
@given(st.lists(letters, max_size=25), stop_lists)
def test_stop_strings_equal_a_search_after_every_token(ids: list[int], stops: list[str]) -> None:
    truth = None
    for index in range(len(ids)):
        text = certain_text(ids[: index + 1])
        ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
        if ends:
            truth = (index, min(ends, key=lambda s: (ends[s], stops.index(s))))
            break
    assert run(ids, stop=stops) == truth


@settings(max_examples=200)
@given(st.lists(letters, max_size=25), st.sampled_from(["a+b$", "c|S", "b{2}", r"[abc]{6}$", "^a.*c", r"(?i)st"]))
def test_patterns_equal_re_search_after_every_token(ids: list[int], pattern: str) -> None:
    hits = (i for i in range(len(ids)) if re.search(pattern, certain_text(ids[: i + 1])))
    index = next(hits, None)
    assert run(ids, stop_regex=pattern) == (None if index is None else (index, pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        r"\s",
        r"\S",
        r"\w",
        r"\W",
        r"[\s]",
        r"[^\S]",
        r"[x\w]",
        r"[^]\W]",
        r"(?#[)\w",
        r"\[\s",
        r"[\]\s]",
        r"\\w",
        r"(?a)\w",
    ],
)
def test_classes_of_characters_are_those_of_re(pattern: str) -> None:
    """Of every character that this Python knows: combining marks, superscripts and separators among them."""
    compiled = regex.compile(as_re_means(pattern), flags=regex.VERSION0)
    known = [
        c
        for c in map(chr, [*range(0x3400), *range(0x3400, 0x30000, 61)])
        if unicodedata.category(c) not in ("Cn", "Cs")
    ]
    for before in ("", "[", "\\"):
        assert [c for c in known if compiled.match(before + c)] == [c for c in known if re.match(pattern, before + c)]


@given(st.text("a_²\u0301 \x1c中.", min_size=1, max_size=6))
def test_borders_of_words_are_those_of_re(text: str) -> None:
    for pattern in (r"\b", r"\B", r"\ba\b", r"[\b]|\B_"):
        found = [m.start() for m in regex.finditer(as_re_means(pattern), text, flags=regex.VERSION0)]
        assert found == [m.start() for m in re.finditer(pattern, text)]


def test_stop_that_begins_inside_held_back_bytes() -> None:
    ids = [VOCAB.table.index(b"\xf0\x9f"), VOCAB.table.index(b"\x98\x80STOP"), ord("x")]
    assert run(ids, stop="😀S") == (1, "😀S")
    assert run(ids, stop="STOP") == (1, "STOP")


def test_strings_come_before_patterns_and_the_first_in_the_text_before_the_first_in_the_list() -> None:
    assert run([256], stop="b", stop_regex="a") == (0, "b")
    assert run([257], stop=["c", "b"]) == (0, "b")
    assert run([257], stop=["bc", "c"]) == (0, "bc")


def test_special_tokens_are_seen_only_when_they_are_shown() -> None:
    assert run([VOCAB.end_id], stop="<|end|>") is None
    assert run([VOCAB.end_id], stop="<|end|>", skip_special_tokens=False) == (0, "<|end|>")


def test_bad_patterns_are_refused_by_name() -> None:
    for params in (
        SamplingParams(stop_regex="("),
        SamplingParams(stop_regex="a" * 300),
        SamplingParams(stop_regex=["a"] * 33),
    ):
        with pytest.raises(RequestError, match="stop_regex"):
            check_stops(params)
    with pytest.raises(RequestError, match=r"^stop:"):
        check_stops(SamplingParams(stop=["a"] * 33))
    check_stops(SamplingParams(stop=["a"] * 32, stop_regex=r"[.!?]\s*$"))


def test_an_exploding_pattern_ends_its_request_and_nothing_else() -> None:
    checker = StopChecker(VOCAB, SamplingParams(stop_regex="x(a|aa)+$"))
    assert not any(checker.append(token_id) for token_id in b"x")
    checker._tail = "x" + "a" * 60
    matched = checker.append(ord("b"))
    assert isinstance(matched, SlowPattern)
    assert "took more than" in matched.reason


@given(st.text("abS", max_size=8), stop_lists)
def test_held_back_is_the_longest_end_that_may_still_become_a_stop(text: str, stops: list[str]) -> None:
    ends = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) and len(s) > n for s in stops)]
    assert held_back(text, tuple(stops)) == max(ends)


def test_trim_cuts_strings_only() -> None:
    params = SamplingParams(stop=["b"], stop_regex=["c"])
    assert trim("abcb", "b", params) == "a"
    assert trim("abc", "c", params) == "abc"
    assert trim("abc", 98, params) == "abc"
    assert trim("abc", "b", SamplingParams(stop=["b"], no_stop_trim=True)) == "abc"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?x)a # one [\n\\s", "a\x1c"),
        ("(?x) # it is (?# so\n\\w", "²"),
        ("(?x: # [\n\\s)", "\x1c"),
        ("(?x)(?-x:#[ab]\\s)", "#a\x1c"),
        ("(?x)(?:a # )[\n)\\s", "a\x1c"),
    ],
)
def test_comments_of_verbose_patterns_are_no_part_of_them(pattern: str, text: str) -> None:
    check_stops(SamplingParams(stop_regex=(pattern,)))
    assert re.search(pattern, text)
    assert regex.search(as_re_means(pattern), text, flags=regex.VERSION0)
