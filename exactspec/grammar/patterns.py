"""Regular expressions that mean here what they mean to their author, or are refused.

The compiler (xgrammar) has two readers of regular expressions. The one for strings in JSON keeps quotes, backslashes
and control characters out; it is chosen for printable ASCII alone, and given up, in silence, for a pattern that no such
string matches: then the other one writes them raw, and the output is no JSON. Both skip or misread some of what they
do not know. So patterns are put in ASCII first, and what would be misread is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_ESCAPE = r"\\u\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\."
_OPEN = r"\((?:\?(?:<[=!]|P?<\w+>|[:=!]))?"
_TOKEN = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:\\.|[^\]\\])*\]|\{{[0-9]*,?[0-9]*\}}|{_OPEN}|.", re.DOTALL)
_KNOWN = frozenset("dDwWsSfnrtvcxubBpPk")  # letters that the compiler knows behind a backslash, or refuses itself
_PAIR = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_SURROGATE = re.compile(r"\\u\{?0*[dD][89a-fA-F][0-9a-fA-F]{2}\}?$")
_LOOKING = ("(?=", "(?!", "(?<=", "(?<!")


def in_ascii(pattern: str) -> str:
    """The same pattern in printable ASCII, whole characters instead of surrogate pairs."""

    def escaped(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        number = ord(match[2])
        return f"\\u{number:04x}" if number < 0x10000 else f"\\u{{{number:x}}}"

    def joined(match: re.Match[str]) -> str:
        high, low = int(match[1], 16), int(match[2], 16)
        return f"\\u{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:x}}}"

    return _PAIR.sub(joined, re.sub(r"(\\[ -~])|\\?([^ -~])", escaped, pattern, flags=re.DOTALL))


def without_newlines(pattern: str) -> str:
    """The same pattern with a dot that means what it means to Python: any character but a line feed."""
    return "".join(r"[^\n]" if token == "." else token for token in _TOKEN.findall(pattern))


def misread(pattern: str) -> str | None:
    """What of a pattern (put `in_ascii`) the compiler would skip or take for something else; None if nothing."""
    tokens = _TOKEN.findall(pattern)
    for before, token in zip(["", *tokens], tokens, strict=False):
        if token in _LOOKING:
            return f"{token}...) is not supported"
        if token == "+" and before[:1] in ("*", "+", "?", "{"):
            return f"the possessive {before}+ is not supported"
        for escape in re.findall(_ESCAPE, token, re.DOTALL) if token[0] in "\\[" else ():
            if escape[1].isalpha() and escape[1] not in _KNOWN:
                return f"the escape {escape} is not supported"
            if _SURROGATE.match(escape):
                return f"{escape} is half a surrogate pair, no character"
    if _anchors_inside(tokens, "^", closing=")") or _anchors_inside(tokens[::-1], "$", closing="("):
        return "^ and $ are supported at the ends only"
    return None


def _anchors_inside(tokens: Sequence[str], anchor: str, *, closing: str) -> bool:
    """Whether an anchor stands behind something else, or in a group that is repeated. Backwards for `$`."""
    begins = True  # nothing came before
    groups: list[tuple[bool, bool]] = []  # of each open one: the same at its begin, and whether it holds an anchor
    anchored = False  # the group that has just been closed holds an anchor
    for token in tokens:
        if anchored and token[0] in "*+?{":
            return True
        anchored = False
        if token == anchor:
            if not begins:
                return True
            groups = [(start, True) for start, _ in groups]
        elif token[0] == closing:
            anchored = bool(groups) and groups.pop()[1]
            begins = False
        elif token[0] in "()":
            groups.append((begins, False))
        elif token == "|":
            begins = groups[-1][0] if groups else True
        else:
            begins = False
    return False


def needs_escapes(rules: Iterable[str]) -> bool:
    """Whether the rules written for a string in JSON let out what may not stand there as it is.

    `rules` are lines of the compiler's own notation, those of the pattern alone.
    """
    return any("\\" in rule or "[^" in rule for rule in rules if "json_string=true" not in rule)


def same_meaning(node: dict[str, Any]) -> str | None:
    """A name in `patternProperties` that another one repeats in other characters; None if there is none."""
    properties = node.get("patternProperties")
    names = list(properties) if isinstance(properties, dict) else []
    seen = [in_ascii(name) for name in names]
    return next((name for at, name in enumerate(names) if seen[at] in seen[:at]), None)


def rewritten(node: dict[str, Any]) -> bool:
    """Puts the patterns of a schema in ASCII, in place. Returns whether anything has changed."""
    changed = False
    names = node.get("propertyNames")  # a schema that may say nothing but its pattern
    for schema in (node, names if isinstance(names, dict) else {}):
        pattern, properties = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str):
            schema["pattern"] = in_ascii(pattern)
            changed |= schema["pattern"] != pattern
        if isinstance(properties, dict):
            schema["patternProperties"] = {in_ascii(name): inner for name, inner in properties.items()}
            changed |= schema["patternProperties"].keys() != properties.keys()
    return changed
