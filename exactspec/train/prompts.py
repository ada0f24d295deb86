"""Where training prompts come from, and which are kept.

Sources: a prompt file (`text/prompt_file.py`); templates; the target itself, which continues its own chat template
inside the user turn.
Filters: length, repetition, near-duplicates, and any run of words shared with prompts that must stay unseen.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exactspec.text.tokenizer import Tokenizer

_WORD = re.compile(r"\w+")
_MARKER = "USER-TURN-GOES-HERE"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful tutor of mathematics. Explain every step.",
    "You are an experienced programmer. Answer with code and short comments.",
    "You answer briefly and to the point.",
    "You are a creative writer.",
    "You are a patient teacher who gives examples.",
)
DEFAULT_SYSTEM_SHARE = 0.75  # of prompts: no system message of ours, the template's default (if any) stays
# How a user turn may begin, so that the target's own prompts vary. "" leaves the start to the target.
STARTS = (
    "", "", "", "", "Write a", "Write a Python function", "Write a program that", "Create a", "Explain", "How do I",
    "How can", "What is", "What are the", "Why does", "I have a", "I want to", "I need help with", "Given",
    "Given the following", "Solve", "Solve the equation", "Calculate", "Find the", "Let $", "If $", "A", "In a",
    "Suppose", "Compare",
    "Describe", "Design", "Can you", "Could you please", "Please", "Rewrite the following", "Summarize", "Translate",
    "List", "Generate", "Imagine", "You are", "Here is", "This code", "```python\n", "def ", "class ", "My", "As a",
    "Consider", "Implement", "Fix the bug", "Act as", "Tell me", "The following", "There are", "SELECT", "Prove that",
    "Develop a", "Analyze", "Convert", "Complete the", "In this task", "Your task is to", "I'm working on",
)  # fmt: skip


class ChatFrame:
    """What the chat template puts before and after a user turn (nothing where there is no template)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def around(self, system: str | None, history: Sequence[dict[str, str]] = ()) -> tuple[str, str]:
        if not self.tokenizer.has_chat_template:
            return "", ""
        messages = [{"role": "system", "content": system}] if system else []
        messages += [*history, {"role": "user", "content": _MARKER}]
        before, _, after = self.tokenizer.render_chat_template(messages).partition(_MARKER)
        return before, after


def frame_prompts(tokenizer: Tokenizer, turns: Sequence[str], seed: int) -> list[list[int]]:
    """Token ids of whole prompts, ready to be answered; system messages drawn at random."""
    rng = random.Random(seed)
    frame = ChatFrame(tokenizer)
    frames = {system: frame.around(system) for system in (None, *SYSTEM_PROMPTS)}
    texts = []
    for turn in turns:
        before, after = frames[_system(rng)]
        texts.append(before + turn + after)
    return encode_all(tokenizer, texts, not tokenizer.has_chat_template)


def _system(rng: random.Random) -> str | None:
    return None if rng.random() < DEFAULT_SYSTEM_SHARE else rng.choice(SYSTEM_PROMPTS)


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
    """Ids of texts, batched: the tokenizer's threads help. A chat template has written the special tokens itself;
    without one the tokenizer adds them, as it does to a prompt that is served."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), 8192):
        ids += tokenizer.hf(list(texts[start : start + 8192]), add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def decode_all(tokenizer: Tokenizer, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Texts without special tokens."""
    backend = tokenizer.hf.backend_tokenizer
    return list(backend.decode_batch([list(ids) for ids in sequences], skip_special_tokens=True))


def openings(tokenizer: Tokenizer, count: int, seed: int) -> tuple[list[list[int]], list[str]]:
    """Prompts that end inside the user turn, for the target to go on, and the words each one starts with."""
    rng = random.Random(seed)
    frame = ChatFrame(tokenizer)
    frames = {system: frame.around(system)[0] for system in (None, *SYSTEM_PROMPTS)}
    starts = [rng.choice(STARTS) for _ in range(count)]
    texts = [frames[_system(rng)] + start for start in starts]
    ids = encode_all(tokenizer, texts, not tokenizer.has_chat_template)
    fallback = tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids, default=0)
    return [sequence or [fallback] for sequence in ids], starts


def user_turn(start: str, written: str) -> str:
    """The whole turn, cut where the target began to answer itself."""
    return (start + written).strip()


class PromptFilter:
    """Decides turn by turn; counts why it dropped some. `unseen` are texts no prompt may overlap with."""

    def __init__(self, unseen: Iterable[str] = (), words: int = 8) -> None:
        self.words = words
        self._unseen = {run for text in unseen for run in word_runs(text, words)}
        self._known: set[int] = set()
        self.dropped: Counter[str] = Counter()

    def keep(self, turn: str, own_repetition: bool = True) -> bool:
        reason = self._reason(turn, own_repetition)
        if reason:
            self.dropped[reason] += 1
        return reason is None

    def _reason(self, turn: str, own_repetition: bool) -> str | None:
        words = _WORD.findall(turn.lower())
        if len(words) < 3:
            return "too short"
        if own_repetition and is_repetitive(words):
            return "repetitive"
        shape = hash(" ".join("#" if w.isdigit() else w for w in words) if own_repetition else turn)
        if shape in self._known:
            return "near-duplicate"
        if self._unseen and any(run in self._unseen for run in word_runs(turn, self.words)):
            return "overlaps with an excluded prompt"
        self._known.add(shape)
        return None


def word_runs(text: str, count: int) -> list[int]:
    """Hashes of all runs of `count` words (lower case, punctuation ignored); a shorter text is one run."""
    words = _WORD.findall(text.lower())
    return [hash(tuple(words[i : i + count])) for i in range(max(1, len(words) - count + 1))]


def is_repetitive(words: Sequence[str], span: int = 3, least_fresh: float = 0.6) -> bool:
    """Whether fewer than `least_fresh` of the runs of `span` words are distinct (texts of 20 words or more)."""
    if len(words) < 20:
        return False
    runs = [tuple(words[i : i + span]) for i in range(len(words) - span + 1)]
    return len(set(runs)) < least_fresh * len(runs)
