"""Tokens of one output to text deltas: what both the Python API and the server show."""

from __future__ import annotations

from collections.abc import Sequence

from exactspec.text.detokenizer import Detokenizer, TokenTable
from exactspec.text.stops import held_back, is_stop_token, trim
from exactspec.types import FinishReason, SamplingParams


class TextStream:
    """Feeds on the steps of one request and returns text that will never be taken back.

    Unfinished characters and possible beginnings of a stop string are held back until decided; the end flushes.
    The deltas laid end to end are `text`, whatever the step borders were.
    """

    def __init__(self, tokenizer: TokenTable, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._params = params
        self._stops: tuple[str, ...] = () if params.no_stop_trim else tuple(params.stop or ())
        self._held = ""  # decoded, not yet given out
        self._pieces: list[str] = []
        self.finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Newly certain text. With `finish` (and the request's last tokens, maybe none) all that is left."""
        if self.finished:
            raise ValueError("the output has already ended")
        if finish is None:
            self._held += self._detokenizer.append(token_ids)
            return self._give(len(self._held) - held_back(self._held, self._stops))
        self.finished = True
        drop_last = is_stop_token(list(token_ids), finish) and not self._params.no_stop_trim
        self._held += self._detokenizer.append(token_ids[:-1] if drop_last else token_ids)
        self._held += self._detokenizer.flush()
        self._held = trim(self._held, finish.matched if finish.kind == "stop" else None, self._params)
        return self._give(len(self._held))

    def _give(self, length: int) -> str:
        delta, self._held = self._held[:length], self._held[length:]
        if delta:
            self._pieces.append(delta)
        return delta


def final_text(tokenizer: TokenTable, token_ids: Sequence[int], finish: FinishReason, params: SamplingParams) -> str:
    """The text of a finished output in one go: equals the deltas of any stream of it."""
    return TextStream(tokenizer, params).append(token_ids, finish)
