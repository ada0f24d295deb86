"""Rules of a grammar that no finite text can come of, found in the compiler's own normal form of it.

Such a rule makes an output that never ends, and the compiler does not survive some of them (a rule whose only way goes
through a counted repeat of itself).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container

_ELEMENT = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # a string
    r"|\[(?:[^\]\\]|\\.)*\]\*?"  # a class of characters
    r"|\(=|[()|]"
    r"|(?P<name>[A-Za-z_][\w.-]*)(?:\{(?P<least>-?\d+), *-?\d+\})?"
    r"|\S"
)
_AHEAD = ""  # stands for what a lookahead holds: nothing depends on it
Production = tuple[str, set[str]]  # a symbol, and the symbols that one way to write it needs


def endless_rules(normal_form: str) -> list[str]:
    """Names of the rules that derive no finite text, in the order of the grammar. `normal_form`: a rule a line, as
    `str(xgrammar.Grammar)` gives it. What is not understood counts as writable."""
    bodies = dict(line.split(" ::= ", 1) for line in normal_form.splitlines() if " ::= " in line)
    productions: list[Production] = []
    for rule, body in bodies.items():
        productions += _productions(rule, body, bodies.keys())
    writable = _writable(productions)
    return [rule for rule in bodies if rule not in writable]


def _productions(rule: str, body: str, rules: Container[str]) -> list[Production]:
    """One for each alternative of the rule and of every group in it, which gets a symbol of its own."""
    made: list[Production] = []
    open_groups: list[Production] = [(rule, set())]
    for element in _ELEMENT.finditer(body):
        text, name = element.group(), element["name"]
        symbol, needs = open_groups[-1]
        if text in ("(", "(="):
            open_groups.append((f"{rule}({element.start()}" if text == "(" else _AHEAD, set()))
        elif text == "|":
            made.append(open_groups.pop())
            open_groups.append((symbol, set()))
        elif text == ")" and len(open_groups) > 1:
            made.append(open_groups.pop())
            if symbol != _AHEAD:
                open_groups[-1][1].add(symbol)
        elif name is not None and name in rules and element["least"] != "0":
            needs.add(name)
    return made + open_groups


def _writable(productions: list[Production]) -> set[str]:
    """Symbols that derive a finite text: those with a way to write them that needs only such symbols."""
    missing = [len(needs) for _, needs in productions]
    wanted_by: dict[str, list[int]] = defaultdict(list)
    for number, (_, needs) in enumerate(productions):
        for symbol in needs:
            wanted_by[symbol].append(number)
    writable: set[str] = set()
    ready = [symbol for symbol, needs in productions if not needs]
    while ready:
        symbol = ready.pop()
        if symbol in writable:
            continue
        writable.add(symbol)
        for number in wanted_by[symbol]:
            missing[number] -= 1
            if not missing[number]:
                ready.append(productions[number][0])
    return writable
