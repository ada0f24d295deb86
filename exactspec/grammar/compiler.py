"""Grammars of requests, compiled by xgrammar in the background, cached and bounded."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

from exactspec.errors import ConfigError, RequestError
from exactspec.grammar.owner import MaskOwner
from exactspec.grammar.patterns import in_ascii, misread, needs_escapes, rewritten, same_meaning, without_newlines
from exactspec.grammar.productive import endless_rules
from exactspec.grammar.schema import check_schema, nodes, patterns
from exactspec.grammar.utf8 import CharacterGuard
from exactspec.types import SamplingParams

KINDS = ("json_schema", "regex", "ebnf")
MAX_CHARS = {"json_schema": 65_536, "regex": 16_384, "ebnf": 65_536}
# The compiler writes strings with a least or greatest length in these characters, raw control characters among them,
# which no JSON string may hold. (Escapes would be right, too; but only a plain class of characters is counted fast.)
_LOOSE_CHARACTER = '[^\\"\\\\\\r\\n]'
_CHARACTER = '[^\\0-\\x1f\\"\\\\]'
_CHECK_FAILED = re.compile(r"Check failed: \([^)]*\)+ is false:\s*")


class TokenTable(Protocol):
    """What this room needs of a tokenizer."""

    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


def needs_grammar(params: SamplingParams) -> bool:
    return _source(params) is not None


def check_grammar(params: SamplingParams) -> None:
    """The cheap checks, without compiling: size, nesting, JSON syntax. Raises RequestError naming the field."""
    source = _source(params)
    if source is None:
        return
    kind, text = source
    if len(text) > MAX_CHARS[kind]:
        raise RequestError(kind, f"has {len(text)} characters; at most {MAX_CHARS[kind]} are allowed")
    if kind == "json_schema":
        check_schema(text)
    elif kind == "regex" and (reason := misread(in_ascii(text))) is not None:
        raise RequestError(kind, reason)


def _source(params: SamplingParams) -> tuple[str, str] | None:
    """(kind, text) of a request's grammar; an empty string counts as unset."""
    for kind in KINDS:
        text = getattr(params, kind)
        if text:
            return kind, text
    return None


class GrammarCompiler:
    """Compiles the grammars of one tokenizer.

    `vocab_size` is the width of a mask (the model's logits), which may exceed the tokenizer's vocabulary; ids that
    stand for no text are never allowed. `prepare` starts a compilation in the background; `owner` waits for it.
    Compiled grammars are cached by their text, the least recently used leave first.
    """

    def __init__(
        self,
        tokenizer: TokenTable,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        timeout_s: float = 10.0,
        max_cached: int = 256,
        max_cached_bytes: int = 256 * 2**20,
        num_threads: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._can_end = any(i < min(tokenizer.vocab_size, vocab_size) for i in self._eos_ids)
        self._timeout_s = timeout_s
        self._max_cached = max_cached
        self._max_cached_bytes = max_cached_bytes
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Future[Any]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._backend: Any = None
        self._guard: CharacterGuard | None = None  # comes with the backend
        self._backend_lock = threading.Lock()

    def prepare(self, params: SamplingParams) -> Future[Any]:
        """Starts compiling the request's grammar, or finds it in the cache. Does not wait.

        Raises RequestError at once for what `check_grammar` refuses; the future raises RequestError for a grammar
        that does not compile.
        """
        check_grammar(params)
        source = _source(params)
        if source is None:
            raise RequestError("json_schema", "the request has no grammar")
        if not self._can_end:
            raise RequestError(
                source[0], "this model has no end token (EOS): no output could end where its grammar does"
            )
        with self._lock:
            future = self._cache.get(source)
            if future is None or (future.done() and future.exception() is not None):
                future = self._executor().submit(self._compile, *source)
                self._cache[source] = future
                self._evict()
            self._cache.move_to_end(source)
            return future

    def compile(self, params: SamplingParams) -> Any:
        """The compiled grammar, waiting for it. Raises RequestError, also when it takes longer than the limit."""
        future = self.prepare(params)
        try:
            return future.result(self._timeout_s)
        except FutureTimeout:
            source = _source(params)
            assert source is not None
            raise RequestError(source[0], f"took more than {self._timeout_s:g} s to compile") from None

    def owner(self, params: SamplingParams) -> MaskOwner:
        """A new owner at the start of the request's grammar."""
        kind, _ = _source(params) or ("grammar", "")
        return MaskOwner(self.compile(params), self._vocab_size, self._eos_ids, kind, self._guard)

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar")
        return self._pool

    def _evict(self) -> None:
        """Oldest first, until the finished ones fit; the newest stays."""
        done = [f for f in self._cache.values() if f.done() and f.exception() is None]
        size = sum(f.result().memory_size_bytes for f in done)
        while len(self._cache) > 1 and (len(self._cache) > self._max_cached or size > self._max_cached_bytes):
            _, oldest = self._cache.popitem(last=False)
            if oldest.done() and oldest.exception() is None:
                size -= oldest.result().memory_size_bytes

    def _compile(self, kind: str, text: str) -> Any:
        """Runs in a thread of the pool; xgrammar works without the interpreter lock."""
        compiler = self._xgrammar()
        try:
            if kind == "json_schema":
                grammar = _compile_schema(compiler, text)
            elif kind == "regex":
                grammar = compiler.compile_regex(without_newlines(_anchored(in_ascii(text))))
            else:
                grammar = _compile_ebnf(compiler, text)
        except (RequestError, ConfigError):
            raise
        except Exception as error:  # whatever it trips over, the fault is the grammar's
            raise RequestError(kind, f"does not compile: {_reason(error)}") from None
        if not MaskOwner(grammar, self._vocab_size, self._eos_ids).can_start:
            raise RequestError(kind, "matches nothing: no token can start the output")
        return grammar

    def _xgrammar(self) -> Any:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend

    def _make_backend(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                "json_schema, regex and ebnf need the grammar extra: pip install 'exactspec[grammar]'"
            ) from error
        tokenizer = self._tokenizer
        count = min(tokenizer.vocab_size, self._vocab_size)
        # an empty entry is a special token to xgrammar: never allowed
        vocab = [b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(count)]
        self._guard = CharacterGuard(vocab, self._vocab_size)
        info = xgrammar.TokenizerInfo(
            vocab,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(i for i in self._eos_ids if i < self._vocab_size),
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compile_ebnf(compiler: Any, text: str) -> Any:
    import xgrammar

    grammar = xgrammar.Grammar.from_ebnf(text)
    endless = endless_rules(str(grammar))
    if endless:
        raise RequestError("ebnf", f"no finite text can come of {', '.join(map(repr, endless[:4]))}")
    return compiler.compile_grammar(grammar)


def _compile_schema(compiler: Any, text: str) -> Any:
    import xgrammar

    text = _with_json_patterns(text, lambda schema: str(xgrammar.Grammar.from_json_schema(schema)))
    if "Length" not in text:
        return compiler.compile_json_schema(text, any_whitespace=True)
    written = str(xgrammar.Grammar.from_json_schema(text, any_whitespace=True))
    return compiler.compile_grammar(written.replace(_LOOSE_CHARACTER, _CHARACTER))


def _with_json_patterns(text: str, write: Callable[[str], str]) -> str:
    """The schema with patterns that the compiler keeps inside JSON strings. `write` gives its rules for a schema.

    Raises RequestError for a pattern that only text with escapes matches: the compiler knows none in patterns.
    """
    schema = json.loads(text)
    found = [(place, node, [*patterns(node)]) for place, node in nodes(schema)]
    for place, node, _ in found:
        if twice := same_meaning(node):
            raise RequestError("json_schema", f"patternProperties at {place} names {twice!r} twice")
    changed = [rewritten(node) for _, node, _ in found]
    for place, _, own in found:
        for pattern in own:
            rules = write(json.dumps({"type": "string", "pattern": in_ascii(pattern)})).splitlines()
            if needs_escapes(rule for rule in rules if rule.startswith("root_")):
                raise RequestError(
                    "json_schema",
                    f"pattern {pattern!r} at {place} matches only what stands in JSON with escapes (quotes, "
                    "backslashes, control characters), which patterns do not get",
                )
    return json.dumps(schema) if any(changed) else text


def _anchored(pattern: str) -> str:
    """The whole output must match: a leading ^ and a trailing $ say nothing more and go."""
    pattern = pattern.removeprefix("^")
    ends_in_anchor = pattern.endswith("$") and (len(pattern) - len(pattern.rstrip("$").rstrip("\\")) - 1) % 2 == 0
    return pattern[:-1] if ends_in_anchor else pattern


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its sources."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = re.sub(r"^\[[^\]]*\] \S+?:\d+: ", "", text)
    return _CHECK_FAILED.sub("", text)[:400]
