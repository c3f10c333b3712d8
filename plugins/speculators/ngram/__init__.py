"""Prompt lookup: what followed the same few tokens earlier in the request, proposed again."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cardcage.core.contracts import PluginContext, Speculator, SpeculatorCaps, SpeculatorNeed

_DEFAULT = 5


class NgramOptions(BaseModel):
    """How long the repeated run of tokens must be. One of the two alone sets both."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt_lookup_min: int | None = Field(
        None, ge=1, le=64, description="shortest run that counts, 1-64; default 5"
    )
    prompt_lookup_max: int | None = Field(
        None, ge=1, le=64, description="longest run that is looked for, 1-64; default 5"
    )

    @model_validator(mode="after")
    def _ordered(self) -> NgramOptions:
        low, high = self.bounds
        if low > high:
            raise ValueError(f"prompt_lookup_min {low} is more than prompt_lookup_max {high}")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """(shortest, longest) run in tokens."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or _DEFAULT, high or low or _DEFAULT


class Ngram:
    """Copies what followed the longest earlier occurrence of the last tokens (prompt lookup)."""

    name = "ngram"
    api = "speculators>=1.0,<2"
    caps = SpeculatorCaps(priority=30)
    options = NgramOptions

    def build(self, need: SpeculatorNeed, ctx: PluginContext, options: Any) -> Speculator:
        from cardcage.plugins.speculators.ngram.lookup import NgramLookup

        return NgramLookup(*(options or NgramOptions()).bounds)
