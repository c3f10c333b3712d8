"""Suffix decoding: what most often followed the same tokens, here and in earlier answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import PluginContext, Speculator, SpeculatorCaps, SpeculatorNeed


class SuffixOptions(BaseModel):
    """Depth of the match, memory of past answers, and how far a match is trusted."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_tree_depth: int = Field(24, ge=2, le=256, description="longest match in tokens, 2-256")
    max_cached_requests: int = Field(
        10000, ge=0, le=10**6, description="past answers that are remembered; 0 = none"
    )
    max_spec_factor: float = Field(
        1.0, gt=0.0, le=16.0, description="drafts per matched token, above 0 up to 16"
    )
    min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, description="a draft less likely than this ends the proposal, 0-1"
    )
    max_occurrences: int = Field(
        256, ge=1, le=10**6, description="newest occurrences of a token that are counted"
    )


class Suffix:
    """Follows the most frequent continuation of the longest matches, also of past answers."""

    name = "suffix"
    api = "speculators>=1.0,<2"
    caps = SpeculatorCaps(priority=30)
    options = SuffixOptions

    def build(self, need: SpeculatorNeed, ctx: PluginContext, options: Any) -> Speculator:
        from cardcage.plugins.speculators.suffix.decoding import SuffixDecoding

        return SuffixDecoding(options or SuffixOptions())
