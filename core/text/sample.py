"""One sample of a request between the engine and its reader: tokens in, deltas out.

Unread text stays here as one growing delta, so a slow reader costs memory for its own answer
and nothing else.
"""

from __future__ import annotations

from cardcage.core.text.detokenizer import Detokenizer
from cardcage.core.types import FinishReason, TextDelta, TokenLogprob, TokenOutput


class Sample:
    """Follows one engine request.

    Args:
        index: position among the samples of the caller's request.
        request_id: the engine's id of this sample.
        detokenizer: None when no text is wanted; then only ids flow.
        include_stop: keep the text of a stop token.
        drop_tokens: swallow every token (a request that only scores its prompt).
    """

    __slots__ = (
        "_detokenizer",
        "_drop",
        "_ids",
        "_include_stop",
        "_logprobs",
        "finish_reason",
        "finish_taken",
        "index",
        "last",
        "num_tokens",
        "request_id",
        "stop_reason",
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        detokenizer: Detokenizer | None,
        *,
        include_stop: bool = False,
        drop_tokens: bool = False,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.finish_taken = False
        self.stop_reason: int | str | None = None
        self.last: TokenOutput | None = None  # newest output: counts and times
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._drop = drop_tokens
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, output: TokenOutput) -> bool:
        """Add an engine output. Returns True when the engine should abort this sample, because
        a stop string ended it here before the engine's own end."""
        self.last = output
        if self.finished:
            return False
        if not self._drop and self._push(output):
            return output.finish_reason is None
        if output.finish_reason is not None:
            self._end(output)
        return False

    def _push(self, output: TokenOutput) -> bool:
        """Feed the tokens; True when a stop string was completed (later tokens are dropped)."""
        logprobs, ids = output.logprobs, output.token_ids
        ended = output.finish_reason is FinishReason.STOP and not self._include_stop
        silent = len(ids) - 1 if ended else -1
        for i, token_id in enumerate(ids):
            logprob = logprobs[i] if logprobs else None
            self.num_tokens += 1
            if self._detokenizer is None:
                self._ids.append(token_id)
                if logprob is not None:
                    self._logprobs.append(logprob)
            elif i == silent:
                self._detokenizer.push_silent(token_id, logprob)
            elif self._detokenizer.push(token_id, logprob):
                self._stop()
                return True
        return False

    def _stop(self) -> None:
        assert self._detokenizer is not None
        self.finish_reason = FinishReason.STOP.value
        self.stop_reason = self._detokenizer.stop_reason
        self._detokenizer.finish()

    def _end(self, output: TokenOutput) -> None:
        assert output.finish_reason is not None
        if self._detokenizer is not None and self._detokenizer.finish():
            self._stop()
            return
        if self._drop:
            self.finish_reason = FinishReason.LENGTH.value
            return
        self.finish_reason = output.finish_reason.value
        self.stop_reason = output.stop_reason

    def end(self, reason: FinishReason) -> None:
        """End the sample from this side (cancelled, or nothing to generate)."""
        if not self.finished:
            if self._detokenizer is not None:
                self._detokenizer.finish()
            self.finish_reason = reason.value

    def take(self) -> TextDelta | None:
        """What became visible since the last call; None when that is nothing."""
        if self._detokenizer is None:
            text, ids, logprobs = "", self._ids, self._logprobs
            offsets = [0] * len(ids)
            self._ids, self._logprobs = [], []
        else:
            text, ids, logprobs, offsets = self._detokenizer.take()
        ends = self.finished and not self.finish_taken
        if not ends and not text and not ids:
            return None
        delta = TextDelta(self.index, text, ids, logprobs, offsets)
        if ends:
            self.finish_taken = True
            delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
        return delta
