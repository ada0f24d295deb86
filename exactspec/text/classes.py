r"""`\s`, `\w` and `\b` as Python's `re` means them, for the package `regex`, which has other sets.

To `re` a word character is a letter, anything numeric, or the underscore; to `regex` combining marks are, too, and "²"
is not. White space differs in four control characters.
"""

from __future__ import annotations

import re

_SPACE = r"\t-\r\x1c-\x1f\x85\p{Z}"
_NO_SPACE = r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\p{L}\p{M}\p{N}\p{P}\p{S}\p{Cf}\p{Co}\p{Cs}\p{Cn}"
_WORD = r"\p{L}\p{N}_"
_NO_WORD = r"\p{M}\p{S}\p{Z}\p{C}\p{Pd}\p{Ps}\p{Pe}\p{Pi}\p{Pf}\p{Po}‿⁀⁔︳︴﹍﹎﹏＿"
_INSIDE = {"s": _SPACE, "S": _NO_SPACE, "w": _WORD, "W": _NO_WORD}  # of a set in brackets
_OUTSIDE = {
    "s": f"[{_SPACE}]", "S": f"[^{_SPACE}]", "w": f"[{_WORD}]", "W": f"[^{_WORD}]",
    "b": f"(?:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))",
    "B": f"(?:(?<=[{_WORD}])(?=[{_WORD}])|(?<![{_WORD}])(?![{_WORD}]))",
}  # fmt: skip
_COMMENT = re.compile(r"\(\?#[^)]*\)")
_LINE_COMMENT = re.compile(rf"{_COMMENT.pattern}|#[^\n]*")  # verbose patterns have these, too
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)-?([a-zA-Z]*):")  # that a group sets and clears


def as_re_means(pattern: str) -> str:
    """A pattern that `re` has found valid, for `regex` (version 0), with the sets of `re` spelled out."""
    if pattern.startswith("(?a)"):
        return pattern  # ASCII sets are the same in both
    pieces, at, in_set = [], 0, False
    verbose, outer = bool(re.compile(pattern).flags & re.VERBOSE), []  # here; around each open group
    while at < len(pattern):
        piece = meant = pattern[at]
        if piece == "\\":
            piece = pattern[at : at + 2]
            meant = (_INSIDE if in_set else _OUTSIDE).get(piece[1:], piece)
        elif in_set:
            in_set = piece != "]"
        elif comment := (_LINE_COMMENT if verbose else _COMMENT).match(pattern, at):
            piece = meant = comment[0]
        elif piece == "[":  # a "]" at the beginning of a set belongs to it
            in_set = True
            piece = meant = next(start for start in ("[^]", "[]", "[^", "[") if pattern.startswith(start, at))
        elif piece == "(":
            outer.append(verbose)
            if flags := _FLAGS.match(pattern, at):
                verbose = "x" in flags[1] or (verbose and "x" not in flags[2])
        elif piece == ")":
            verbose = outer.pop()
        pieces.append(meant)
        at += len(piece)
    return "".join(pieces)
