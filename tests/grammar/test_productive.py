"""Rules that no finite text can come of: found in any grammar, against a slow search, and refused before the compiler
meets them (it does not survive some)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_owner import EOS, WIDTH, Bytes

from exactspec.errors import RequestError
from exactspec.grammar import GrammarCompiler
from exactspec.grammar.productive import endless_rules
from exactspec.types import SamplingParams

xgrammar = pytest.importorskip("xgrammar")
DEADLY = ["root ::= root{2}", "root ::= root{1,}", "root ::= x{2}\nx ::= root", 'root ::= "b" x\nx ::= x{2}']


def endless(text: str) -> list[str]:
    return endless_rules(str(xgrammar.Grammar.from_ebnf(text)))


@pytest.mark.parametrize("text", [*DEADLY, "root ::= root", 'root ::= "a" | x\nx ::= "b" (x | x x) "c"'])
def test_endless_grammars_are_refused(text: str) -> None:
    compiler = GrammarCompiler(Bytes(), WIDTH, {EOS})
    with pytest.raises(RequestError, match="ebnf: no finite text"):
        compiler.compile(SamplingParams(ebnf=text))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" | root{2}', "root ::= root*", "root ::= [^)|(\\]]{2,5} x?\nx ::= x{0,3}",
        'root ::= "\\"(|x{2}" ("c" | "d" "e")+ y (=("z"))\ny ::= ""', 'root ::= ("b" root)? # x ::= x',
    ],
)  # fmt: skip
def test_others_are_not(text: str) -> None:
    assert endless(text) == []


NAMES = ("root", "x", "y", "z")
Body = tuple[str, Callable[[set[str]], bool]]  # a grammar's text, and whether it can be written with these rules


def repeated(part: Body, how_often: str) -> Body:
    text, writable = part
    return f"({text}){how_often}", (lambda _: True) if how_often in ("?", "*", "{0,2}") else writable


def joined(parts: list[Body], by: str) -> Body:
    every = all if by == " " else any
    return f"({by.join(text for text, _ in parts)})", lambda good: every(writable(good) for _, writable in parts)


BODIES: st.SearchStrategy[Body] = st.recursive(
    st.one_of(
        st.sampled_from([('"a(|"', lambda _: True), ('""', lambda _: True), ("[)b-d]", lambda _: True)]),
        st.sampled_from([(name, lambda good, name=name: name in good) for name in NAMES]),
    ),
    lambda inner: st.one_of(
        st.builds(joined, st.lists(inner, min_size=1, max_size=3), st.sampled_from([" ", " | "])),
        st.builds(repeated, inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{1,}"])),
    ),
    max_leaves=8,
)


@given(bodies=st.lists(BODIES, min_size=4, max_size=4))
def test_against_a_slow_search(bodies: list[Body]) -> None:
    good: set[str] = set()
    for _ in NAMES:
        good |= {name for name, (_, writable) in zip(NAMES, bodies, strict=True) if writable(good)}
    text = "\n".join(f"{name} ::= {body}" for name, (body, _) in zip(NAMES, bodies, strict=True))
    assert set(endless(text)) & set(NAMES) == set(NAMES) - good
