"""Whatever a body holds, the answer is a result or a client's mistake, never a server's."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from cardcage.core.errors import RequestError
from cardcage.core.text.intake import Intake
from cardcage.plugins.frontends.openai_http import OpenAIHttpOptions, chat, completions
from cardcage.plugins.frontends.openai_http.errors import ApiError, error_response, to_api_error
from cardcage.plugins.frontends.openai_http.protocol import (
    REFUSED,
    RENAMED,
    ChatBody,
    CompletionBody,
    parse_body,
    parse_json,
)
from tests.support.fake_engine import ByteTokenizer, make_info

INTAKE = Intake.for_model(make_info(), ByteTokenizer())
OPTIONS = OpenAIHttpOptions()
FIELDS = sorted(
    {*ChatBody.model_fields, *CompletionBody.model_fields, *REFUSED, *RENAMED, "unknown"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["hi", "\ud800", "left", "user"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


def request() -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": []})


def handle(kind: Any, module: Any, raw: bytes) -> None:
    data = parse_json(raw, "application/json", OPTIONS.max_json_depth)
    body = parse_body(kind, data, False, lambda name: None)
    if kind is ChatBody:
        made = [module.to_request(body, request(), "id", OPTIONS)]
    else:
        made = module.to_requests(body, request(), "id", OPTIONS)
    for one in made:
        INTAKE.prepare(one)


def status_of(kind: Any, module: Any, raw: bytes) -> int:
    """200, or the status of the mistake that was found."""
    try:
        handle(kind, module, raw)
    except (ApiError, RequestError) as error:
        answer = error_response(to_api_error(error))
        assert len(bytes(answer.body)) < 8192
        return answer.status_code
    return 200


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_any_value_in_any_field(changes: dict[str, Any]) -> None:
    raw = json.dumps({**GOOD, **changes}).encode()
    for kind, module in ((ChatBody, chat), (CompletionBody, completions)):
        assert status_of(kind, module, raw) in (200, 400)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60))
def test_any_bytes(raw: bytes) -> None:
    assert status_of(ChatBody, chat, raw) in (200, 400)


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id"]),
            VALUES,
            max_size=4,
        ),
        max_size=3,
    )
)
def test_any_messages(messages: list[dict[str, Any]]) -> None:
    raw = json.dumps({"messages": messages}).encode()
    assert status_of(ChatBody, chat, raw) in (200, 400)
