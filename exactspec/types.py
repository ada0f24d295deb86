"""The vocabulary of the project: requests, batches, proposals and results. Imports no room of exactspec.

Symbols used in shapes: R requests of a step, T rows (tokens) of a step laid end to end, N rows whose
logits are needed, V vocabulary, H hidden size, G gamma (draft tokens per round, anchor not counted).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from exactspec.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

LogprobsKind = Literal["raw", "scaled", "processed"]
GREEDY_BELOW = 1e-6  # temperatures under this are greedy, as in SGLang
# Logits are float32. With these bounds no bias, penalty and temperature together make an infinity or a NaN of one:
# (x / LEAST_REPETITION_PENALTY + MOST_BIAS) / GREEDY_BELOW is finite for every |x| <= 1e12.
MOST_BIAS = 1e30
MOST_TEMPERATURE = 1e30
LEAST_REPETITION_PENALTY = 1e-20


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | int):
        return (value,)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Checks that need the model (vocabulary, context) are made at admission.

    `seed=None` draws one, which is reported. `top_k=-1` means all. `logprobs` is the number of most likely
    alternatives per output token (0 = the token's own only, None = no logprobs); likewise `prompt_logprobs`.
    `prompt_logprob_start` is the first prompt position that is scored. `logprob_token_ids` are scored at
    every reported position, in the given order, duplicates included.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_regex: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    logprobs: int | None = None
    logprobs_kind: LogprobsKind = "raw"
    logprob_token_ids: tuple[int, ...] | list[int] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex", "stop_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        _check_numbers(self)
        _check_stops(self)
        _check_logprobs(self)
        _check_kinds(self)
        grammars = [name for name in ("json_schema", "regex", "ebnf") if getattr(self, name)]
        if len(grammars) > 1:
            raise RequestError(grammars[1], f"cannot be combined with {grammars[0]}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def has_filters(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _check_numbers(params: SamplingParams) -> None:
    """Finite numbers inside their ranges; bool is not a number here."""
    ranges: dict[str, tuple[float, float, bool]] = {  # name: low, high, low end allowed
        "temperature": (0.0, MOST_TEMPERATURE, True),
        "top_p": (0.0, 1.0, False),
        "min_p": (0.0, 1.0, True),
        "frequency_penalty": (-2.0, 2.0, True),
        "presence_penalty": (-2.0, 2.0, True),
        "repetition_penalty": (LEAST_REPETITION_PENALTY, 2.0, True),
    }
    for name, (low, high, closed) in ranges.items():
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise RequestError(name, f"must be a finite number, got {value!r}")
        if value < low or value > high or (value == low and not closed):
            raise RequestError(name, f"must be in {'[' if closed else '('}{low:g}, {high:g}], got {value!r:.40}")
    for name, least in (("min_new_tokens", 0), ("n", 1), ("prompt_logprob_start", 0)):
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RequestError(name, f"must be an integer >= {least}, got {value!r}")
    limit = params.max_new_tokens
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise RequestError("max_new_tokens", f"must be an integer >= 0 or None, got {limit!r}")
    if limit is not None and params.min_new_tokens > limit:
        raise RequestError("min_new_tokens", f"{params.min_new_tokens} is over max_new_tokens {limit}")
    top_k = params.top_k
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not (top_k == -1 or 1 <= top_k < 2**63):
        raise RequestError("top_k", f"must be -1 (all) or a 64-bit integer >= 1, got {top_k!r}")
    seed = params.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise RequestError("seed", f"must be a 64-bit integer, got {seed!r}")
    if not isinstance(params.logit_bias, Mapping | None):
        raise RequestError("logit_bias", f"must be a dict from token ids to numbers, got {params.logit_bias!r:.80}")
    for token_id, bias in (params.logit_bias or {}).items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not abs(bias) <= MOST_BIAS:  # a NaN is not <= anything
            raise RequestError("logit_bias", f"token {token_id}: must be a number within +-{MOST_BIAS:g}, got {bias!r}")


def _check_stops(params: SamplingParams) -> None:
    for name in ("stop", "stop_regex"):
        for text in getattr(params, name):
            if not isinstance(text, str) or not text:
                raise RequestError(name, f"must hold non-empty strings, got {text!r}")
    for token_id in params.stop_token_ids or ():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError("stop_token_ids", f"must hold integers, got {token_id!r}")


def _check_logprobs(params: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise RequestError(name, f"must be None or an integer >= 0, got {value!r}")
    if params.logprobs_kind not in ("raw", "scaled", "processed"):
        raise RequestError("logprobs_kind", f"must be raw, scaled or processed, got {params.logprobs_kind!r}")
    for token_id in params.logprob_token_ids or ():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise RequestError("logprob_token_ids", f"must hold token ids, got {token_id!r}")


def _check_kinds(params: SamplingParams) -> None:
    for name in ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise RequestError(name, f"must be True or False, got {getattr(params, name)!r}")
    for name in ("json_schema", "regex", "ebnf"):
        value = getattr(params, name)
        if value is not None and not (isinstance(value, str) and value):
            what = "a JSON document as text" if name == "json_schema" else "a non-empty string"
            raise RequestError(name, f"must be {what} or None, got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate (n is already expanded: each sample is a request of its own)."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # resolved: never None
    priority: int = 0  # larger runs earlier; ties first come first served
    cache_namespace: str = ""  # requests share prefixes only inside a namespace
    return_hidden_states: bool = False
    sampling_mask: Literal["selected", "support"] | None = None
    max_drafts: int | None = None  # draft tokens a round, at most; 0 decodes plainly. Speed only (contract C1)


class TokenSource(StrEnum):
    """How an output token came to be."""

    PLAIN = "plain"  # drawn with no draft before it in its round (prefill, plain decode)
    ACCEPTED = "accepted"  # drafted and accepted
    CORRECTION = "correction"  # drawn where a draft token was rejected
    BONUS = "bonus"  # drawn after every verified draft token was accepted


@dataclass(slots=True)
class TokenLogprob:
    """The logprob entry of one token, in nats. `logprob` is None only for prompt position 0.

    `top`: the k most likely (token_id, logprob), falling; `chosen`: the asked ids in the asked order.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    chosen: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class FinishReason:
    """Why a request ended. `matched` is the stop token id, the stop string or the stop regex pattern."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


@dataclass(slots=True)
class RequestStats:
    """Counts of one request. A round is one target forward over an anchor and its verified drafts."""

    rounds: int = 0
    num_drafted: int = 0  # proposed
    num_verified: int = 0  # sent to the target
    num_accepted: int = 0  # accepted, bonus excluded
    num_committed: int = 0  # accepted + bonus of all rounds, before any stop cut
    accepted_per_round: list[int] = field(default_factory=list)
    verified_per_round: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    num_retracted: int = 0

    def note_round(self, drafted: int, verified: int, accepted: int, committed: int) -> None:
        """Counts one round."""
        self.rounds += 1
        self.num_drafted += drafted
        self.num_verified += verified
        self.num_accepted += accepted
        self.num_committed += committed
        self.accepted_per_round.append(accepted)
        self.verified_per_round.append(verified)

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per round, bonus included; 0.0 before the first round."""
        return self.num_committed / self.rounds if self.rounds else 0.0


@dataclass(slots=True)
class StepOutput:
    """What one step adds to one request: already cut at the stop, never a drafted token that was not emitted."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    sources: list[TokenSource]
    finish: FinishReason | None
    stats: RequestStats
    prompt_logprobs: list[TokenLogprob] | None = None  # on the output that completes the prefill
    hidden_states: list[Tensor] | None = None  # one [H] row per token of token_ids; prompt rows: see prompt_hidden
    prompt_hidden: Tensor | None = None  # [prefilled rows, H], on the output that completes the prefill
    sampling_mask: list[tuple[list[int], list[float]]] | None = None  # per token: support ids, their logprobs
    next_token: TokenLogprob | None = None  # max_new_tokens=0 with logprobs: the token that would have come


@dataclass(slots=True)
class RequestOutput:
    """A finished answer of the Python API."""

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    stats: RequestStats
    seed: int
    logprobs_kind: LogprobsKind
    sources: list[TokenSource] = field(default_factory=list)
    request_id: str = ""


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request while the engine owns it. Few lengths are stored; the rest are derived.

    Owners: token_ids, results and stats belong to the engine; kv_len, pages and cache fields to the scheduler and
    cache; `grammar` to the grammar room. Between steps a decoding request has kv_len == len(token_ids) - 1:
    the last token is the anchor, committed, its K/V not yet written.
    """

    request: Request
    token_ids: list[int]  # prompt + committed output
    arrival: int = 0  # running number, for first come first served
    kv_len: int = 0  # tokens whose target (and draft) K/V are in the pool
    pages: list[int] = field(default_factory=list)  # page ids in order; the first ones may belong to the prefix cache
    cache_node: Any = None  # locked node of the radix tree
    num_shared_pages: int = 0  # leading pages owned by the tree
    max_tokens: int = 0  # prompt + output limit, resolved at admission
    stop_ids: frozenset[int] = frozenset()  # tokens that end it, likewise
    stats: RequestStats = field(default_factory=RequestStats)
    prompt_logprobs: list[TokenLogprob] | None = None
    prompt_hidden: list[Any] | None = None
    grammar: Any = None  # grammar.MaskOwner or None
    stop_checker: Any = None  # text.StopChecker or None
    history: Any = None  # sampling.OutputHistory (token counts for penalties) or None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def prefill_end(self) -> int:
        """Prefill covers the prompt; after a retraction also the committed output, the anchor excluded."""
        return self.prompt_len if self.num_output == 0 else len(self.token_ids) - 1

    @property
    def is_prefilling(self) -> bool:
        return self.kv_len < self.prefill_end

    @property
    def draft_room(self) -> int:
        """Draft tokens worth proposing now: the limit leaves no use for more (the bonus takes one place)."""
        room = max(0, self.max_tokens - len(self.token_ids) - 1)
        most = self.request.max_drafts
        return room if most is None else min(room, most)


@dataclass(slots=True)
class ForwardBatch:
    """All rows of a step, ragged: request r owns rows q_start[r] : q_start[r + 1]. All tensors on the device.

    A row attends to keys 0 .. its own position (causal) or, with causal=False (draft blocks), to all kv_len[r] keys.
    kv_len[r] counts this step's rows. slots = page * page_size + offset is where a row's K/V are written.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32
    q_start: Tensor  # [R + 1] int32
    kv_len: Tensor  # [R] int32
    page_table: Tensor  # [R, P] int32, unused entries 0
    logit_rows: Tensor  # [N] int64
    page_size: int
    causal: bool = True
    max_kv_len: int = 0  # host copies: sizing without a device read-back
    max_q_len: int = 0

    @property
    def num_requests(self) -> int:
        return self.kv_len.shape[0]

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]


@dataclass(slots=True)
class Proposal:
    """Draft tokens of one round, by request. Arrays never contain the anchor.

    token_ids[R, G] int64 (entries at and beyond lengths[r] are meaningless); lengths[R] on the host.
    `probs` [R, G, V] is the exact distribution each token was drawn from (None: deterministic, i.e. one-hot);
    only filled when asked for. `confidence` [R, G]: probability that token k is accepted given its prefix was.
    """

    token_ids: Tensor
    lengths: list[int]
    probs: Tensor | None = None
    confidence: Tensor | None = None
