"""Which JSON schemas are served: those whose every word the compiler keeps.

The compiler (xgrammar) drops what it cannot express, without a word, sometimes a whole schema with it: of an `allOf` of
two it makes "anything". An output that only looks as if it followed its schema is worse than a refusal (contract C6),
so what would be dropped is refused here by its place and name. Annotations, unknown words and unknown formats are free,
as JSON Schema says. Two readings are the compiler's own: `oneOf` is taken as `anyOf`, and an object whose schema
does not mention `additionalProperties` has no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from exactspec.errors import RequestError
from exactspec.grammar.patterns import in_ascii, misread

MAX_DEPTH = 64  # compile time grows with the cube of the nesting
MAX_PATTERN = 10_000  # characters of a pattern, repeats written out: compile time grows with the square

NEVER = (
    "not", "if", "then", "else", "contains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
SELECTORS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the compiler follows one of them and nothing beside
WORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    ),
}  # fmt: skip
ASSERTIONS = frozenset(word for words in WORDS.values() for word in words)
SHAPES_OBJECT = ("properties", "additionalProperties", "unevaluatedProperties", "patternProperties")
SHAPES_ARRAY = ("items", "prefixItems", "unevaluatedItems")
FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
    "uri-template", "uuid", "json-pointer", "relative-json-pointer",
)  # fmt: skip  # those that the compiler enforces; others are annotations
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def check_schema(text: str) -> None:
    """Raises RequestError, field json_schema, for what is no schema or would not be kept to the letter."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("json_schema", f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise RequestError("json_schema", f"must be a JSON object, got {type(schema).__name__}")
    _check_depth(schema)
    work = 0
    for place, node in nodes(schema):
        _check_node(place, node)
        work += sum(written_out(pattern) ** 2 for pattern in patterns(node))
        if work > MAX_PATTERN**2:
            raise RequestError("json_schema", f"pattern at {place} is too large: its repeats count too far")
        for pattern in patterns(node):
            if (reason := misread(in_ascii(pattern))) is not None:
                raise RequestError("json_schema", f"pattern {pattern!r} at {place}: {reason}")


def nodes(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that a schema is made of, each once, with its place."""
    seen: dict[int, Any] = {}  # keeps what it has seen, so that no id comes twice
    todo: list[tuple[str, Any]] = [("#", schema)]
    while todo:
        place, node = todo.pop()
        if isinstance(node, dict) and id(node) not in seen:
            seen[id(node)] = node
            yield place, node
            todo += _below(place, node, schema)


def patterns(node: Mapping[str, Any]) -> Sequence[str]:
    """The regular expressions of a schema's own."""
    own, named = node.get("pattern"), node.get("patternProperties")
    return [*([own] if isinstance(own, str) else ()), *(named if isinstance(named, dict) else ())]


def written_out(pattern: str) -> int:
    """Characters and classes of a regular expression after its counted repeats have been written out."""
    totals, last, at = [0], 0, 0  # totals of the groups that are open; size of the newest item
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        text = token.group() if token else pattern[at]
        at += len(text)
        if text == "(":
            totals.append(0)
        elif text == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif _REPEAT.fullmatch(text):
            numbers = [int(digits) if len(digits) < 9 else 10**9 for digits in re.findall("[0-9]+", text)]
            totals[-1] += last * (max(numbers) - 1)
            last *= max(numbers)
        elif text not in ("*", "+", "?", "|", ")"):
            last = 1
            totals[-1] += 1
    return sum(totals)


_REPEAT = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_TOKEN = re.compile(rf"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|{_REPEAT.pattern}", re.DOTALL)


def _check_depth(schema: Any) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        below = [item for node in level for item in _children(node)]
        if not below:
            return
        level = below
    raise RequestError("json_schema", f"is nested more than {MAX_DEPTH} levels deep")


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _below(place: str, node: Mapping[str, Any], root: Any) -> Iterable[tuple[str, Any]]:
    """The schemas that this one is made of; what nothing refers to is not looked at."""
    for word in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
        yield f"{place}/{word}", node.get(word)
    names = node.get("propertyNames")
    if isinstance(names, dict):  # names are strings, said or not
        alone = any(word in names for word in (*SELECTORS, "type"))
        yield f"{place}/propertyNames", names if alone else {"type": "string", **names}
    for word in ("properties", "patternProperties"):
        inner = node.get(word)
        for name, schema in inner.items() if isinstance(inner, dict) else ():
            yield f"{place}/{word}/{name}", schema
    for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = node.get(word)
        for number, schema in enumerate(inner if isinstance(inner, list) else ()):
            yield f"{place}/{word}/{number}", schema
    reference = node.get("$ref")
    if isinstance(reference, str):
        if not reference.startswith("#"):
            raise RequestError("json_schema", f"$ref {reference!r} points outside the schema: not supported")
        yield reference, _target(reference, root)


def _target(reference: str, root: Any) -> Any:
    """What a reference points to (RFC 6901); None where it points to nothing: the compiler says so."""
    node = root
    for part in reference.removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _check_node(place: str, node: Mapping[str, Any]) -> None:
    def refuse(word: str, why: str) -> None:
        raise RequestError("json_schema", f"{word} at {place} {why}: it would not be enforced")

    for word in NEVER:
        if word in node:
            refuse(word, "is not supported")
    if node.get("uniqueItems"):
        refuse("uniqueItems", "is not supported")
    chosen = next((word for word in SELECTORS if word in node), None)
    if chosen is not None:
        _check_beside(place, chosen, node, refuse)
        return
    types = _types(node)
    for word in _assertions(node):
        if not types:
            refuse(word, "needs a type beside it")
        if word == "multipleOf" and "number" in types:
            refuse(word, "is supported for integers only")
    _check_string(node, refuse)
    _check_object(place, node, refuse)


def _assertions(node: Mapping[str, Any]) -> list[str]:
    """The words of a node that restrict what it allows."""
    return [word for word in node if word in ASSERTIONS and (word != "format" or node[word] in FORMATS)]


def _types(node: Mapping[str, Any]) -> frozenset[str]:
    """The declared types; without any, the one that the compiler concludes from the words."""
    declared = node.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    if any(word in node for word in SHAPES_OBJECT):
        return frozenset({"object"})
    return frozenset({"array"}) if any(word in node for word in SHAPES_ARRAY) else frozenset()


def _check_beside(place: str, chosen: str, node: Mapping[str, Any], refuse: Any) -> None:
    """Beside $ref, const, enum, anyOf, oneOf or allOf nothing may be said that they do not say themselves."""
    for word in [*_assertions(node), *(word for word in SELECTORS if word in node and word != chosen)]:
        refuse(word, f"stands beside {chosen}")
    inner = node[chosen]
    if chosen in ("anyOf", "oneOf", "allOf") and (not isinstance(inner, list) or not inner):
        raise RequestError("json_schema", f"{chosen} at {place} must be a list of schemas, one at least")
    if chosen == "allOf" and isinstance(inner, list) and len(inner) > 1:
        refuse("allOf", "of more than one schema is not supported")
    if "type" not in node:
        return
    wanted = _types({"type": node["type"]})
    if chosen in ("const", "enum"):
        values = inner if chosen == "enum" and isinstance(inner, list) else [inner]
        if not all(_is_any(value, wanted) for value in values):
            refuse("type", f"contradicts {chosen}")
    elif chosen == "$ref" or not all(isinstance(part, dict) and _says(part, wanted) for part in inner):
        refuse("type", f"stands beside {chosen}")


def _says(part: Mapping[str, Any], wanted: frozenset[str]) -> bool:
    """Whether a branch itself declares no type but the wanted ones ("number" includes integers)."""
    types = _types({"type": part.get("type")})
    return bool(types) and all(t in wanted or (t == "integer" and "number" in wanted) for t in types)


def _is_any(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, TYPES.get(name, ())) and name != "boolean" for name in types)


def _check_string(node: Mapping[str, Any], refuse: Any) -> None:
    form = node.get("format")
    has_format = isinstance(form, str) and form in FORMATS
    if has_format and "pattern" in node:
        refuse("pattern", f"stands beside format {form}")
    for word in ("minLength", "maxLength"):
        if word in node and (has_format or "pattern" in node):
            refuse(word, "stands beside " + ("pattern" if "pattern" in node else f"format {form}"))


def _check_object(place: str, node: Mapping[str, Any], refuse: Any) -> None:
    known = node.get("properties")
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError("json_schema", f"required at {place} must be a list of names")
    for name in required:
        if not isinstance(known, dict) or name not in known:
            refuse("required", f"names {name!r}, which is not among the properties")
    if "patternProperties" in node and "propertyNames" in node:
        refuse("propertyNames", "stands beside patternProperties")
    patterns = node.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) and isinstance(known, dict) else ():
        if any(_matches(pattern, name) for name in known or ()):
            refuse("patternProperties", f"has {pattern!r}, which one of the properties matches")


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError):
        return False  # the compiler says what it thinks of it
