"""The OpenAI-compatible HTTP frontend: chat completions, completions, and what belongs to them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cardcage.core.contracts import Frontend, FrontendCaps, FrontendNeed, PluginContext


class OpenAIHttpOptions(BaseModel):
    """`[plugin."cardcage/openai-http"]`"""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_n: int = Field(128, ge=1, le=16384, description="most samples per prompt")
    max_prompts: int = Field(1024, ge=1, description="most prompts in one completions request")
    max_stop: int = Field(4, ge=1, description="most stop strings")
    max_json_depth: int = Field(64, ge=4, le=512, description="deepest nesting of a body")
    strict_fields: bool = Field(False, description="unknown request fields are an error")
    priority_header: str | None = Field(
        "x-vllm-priority", description="header that overrides a body's priority; none = off"
    )
    trust_body_priority: bool = Field(True, description="clients may set priority in the body")
    request_id_header: bool = Field(True, description="echo X-Request-Id in the answer")
    prompt_tokens_details: bool = Field(True, description="show cached prompt tokens in usage")
    force_include_usage: bool = Field(False, description="usage in every stream, in every chunk")
    sse_keep_alive_s: float = Field(
        0.0, ge=0.0, description="comment line after so much silence in a stream; 0 = never"
    )
    write_timeout_s: float = Field(
        300.0, gt=0.0, description="a stream whose client reads nothing for so long is aborted"
    )
    system_fingerprint: str | None = Field(None, description="shown in every answer")
    public_metrics: bool = Field(True, description="/metrics needs no key")


class OpenAIHttp:
    """OpenAI-compatible HTTP: chat completions, completions, models, tokenize, metrics."""

    name = "openai-http"
    api = "1.0"
    caps = FrontendCaps(
        features=frozenset({"http"}),
        requires={"fastapi": "pip install fastapi"},
        priority=50,
    )
    options = OpenAIHttpOptions

    def build(self, need: FrontendNeed, ctx: PluginContext, options: Any) -> Frontend:
        from cardcage.plugins.frontends.openai_http.app import OpenAIFrontend

        return OpenAIFrontend(options or OpenAIHttpOptions(), ctx.logger)
