"""A request's sampling parameters as the device sees them: one row of words, one set of bits.

The bits (`Feature`) are for the host, which decides with them what a step must run; the words
are gathered by slot on the device.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from cardcage.core.types import SamplingParams

Int32 = NDArray[np.int32]

# Columns of the parameter table, int32 words per slot; floats and the seed are bit patterns.
TEMPERATURE, TOP_P, MIN_P, TOP_K, REPETITION, FREQUENCY, PRESENCE, PENALTY_ROW = range(8)
SEED = 8  # two words
PROMPT_LEN = 10
NUM_PARAMS = 12
# Bit of a penalty count that says "occurs in the prompt"; the bits below count outputs.
IN_PROMPT = 1 << 30


class Feature(IntFlag):
    """What a slot's request asks of the sampler beyond the most likely token."""

    RANDOM = 1
    TEMPERATURE = 2
    MIN_P = 4
    TRUNCATE = 8
    ALLOWED = 16
    BIAS = 32
    MIN_TOKENS = 64
    PENALTY = 128
    BAD_WORDS = 256
    PLUGIN = 512
    LOGPROBS = 1024
    PROMPT_LOGPROBS = 2048


def features_of(params: SamplingParams) -> int:
    """The `Feature` bits of a request."""
    bits = Feature(0)
    if not params.greedy:
        bits |= Feature.RANDOM
        bits |= Feature.TEMPERATURE if params.temperature != 1.0 else Feature(0)
        bits |= Feature.MIN_P if params.min_p > 0.0 else Feature(0)
        bits |= Feature.TRUNCATE if params.top_p < 1.0 or params.top_k > 0 else Feature(0)
    neutral = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    for bit, wanted in (
        (Feature.ALLOWED, params.allowed_token_ids is not None),
        (Feature.BIAS, bool(params.logit_bias)),
        (Feature.MIN_TOKENS, params.min_tokens > 0),
        (Feature.PENALTY, neutral != (1.0, 0.0, 0.0)),
        (Feature.BAD_WORDS, bool(params.bad_words_ids)),
        (Feature.LOGPROBS, params.logprobs is not None),
        (Feature.PROMPT_LOGPROBS, params.prompt_logprobs is not None),
    ):
        if wanted:
            bits |= bit
    return int(bits)


def param_words(params: SamplingParams, seed: int, prompt_len: int, penalty_row: int) -> Int32:
    """One row of the parameter table, int32 [NUM_PARAMS]. Greedy rows get neutral truncation."""
    words = np.zeros(NUM_PARAMS, np.int32)
    floats = words.view(np.float32)
    greedy = params.greedy
    floats[TEMPERATURE] = params.temperature
    floats[TOP_P] = 1.0 if greedy else params.top_p
    floats[MIN_P] = 0.0 if greedy else params.min_p
    words[TOP_K] = 0 if greedy else params.top_k
    floats[REPETITION] = params.repetition_penalty
    floats[FREQUENCY] = params.frequency_penalty
    floats[PRESENCE] = params.presence_penalty
    words[PENALTY_ROW] = penalty_row
    unsigned = np.array([seed & (2**64 - 1)], np.uint64)
    words[SEED : SEED + 2] = unsigned.view(np.int32)
    words[PROMPT_LEN] = prompt_len
    return words
