"""The HTTP API against the real `openai` client and raw requests, over a fake engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_engine import ByteTokenizer, make_info, make_parts
from tests.support.live_server import LiveServer

TOKENS = ByteTokenizer()
EOS = TOKENS.eos_token_ids[0]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat_ids(text: str) -> tuple[int, ...]:
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(TOKENS.encode(rendered, False))


SCRIPT = {
    chat_ids("greet"): [*b"Hello, ", *"wörld 😀".encode(), EOS],
    chat_ids("stop"): list(b"one STOP two"),
    tuple(TOKENS.encode("greet")): [*b"Hello", EOS],
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(script=SCRIPT) as live:
        yield live


@pytest.fixture(scope="module")
def api(server: LiveServer) -> Any:
    return server.openai()


def events(response: Any) -> list[str]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def stream_chunks(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.web.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    found = events(response)
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    return [json.loads(line) for line in found[:-1]]


# ---- shapes -------------------------------------------------------------------------------------


def test_chat(api: Any) -> None:
    answer = api.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "greet"}], temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello, wörld 😀"
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert answer.usage.prompt_tokens == len(chat_ids("greet"))
    assert answer.usage.completion_tokens == 19
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 19
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_shape(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "greet"}], "temperature": 0}
    chunks = stream_chunks(server, "/v1/chat/completions", body)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert all("usage" not in c for c in chunks)
    texts = [c["choices"][0]["delta"].get("content") for c in chunks[1:]]
    assert "".join(t or "" for t in texts) == "Hello, wörld 😀"
    assert all(texts[:-1]), "no empty chunk before the last"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] is None


def test_stream_equals_whole(api: Any) -> None:
    asked: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "x"}],
        "seed": 5,
        "n": 2,
        "max_tokens": 12,
    }
    whole = api.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in api.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert texts[0] != texts[1]
    assert whole.usage.completion_tokens == 24


@pytest.mark.parametrize(
    ("options", "has_last", "has_running"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_only_when_asked(
    server: LiveServer, path: str, options: Any, has_last: bool, has_running: bool
) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    body |= CHAT if "chat" in path else {"prompt": "hi"}
    if options is not None:
        body["stream_options"] = options
    chunks = stream_chunks(server, path, body)
    last = chunks[-1]
    if has_last:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        chunks = chunks[:-1]
    for chunk in chunks:
        assert bool(chunk.get("usage")) == has_running


def test_completion(api: Any) -> None:
    answer = api.completions.create(model="fake", prompt="greet", temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 6


def test_completion_has_sixteen_tokens_by_default(api: Any) -> None:
    answer = api.completions.create(model="fake", prompt="x", temperature=0)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_many_prompts_and_samples_have_ordered_indices(server: LiveServer) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 5}
    whole = server.web.post("/v1/completions", json=body).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 4
    assert whole["usage"]["completion_tokens"] == 20
    texts = ["", "", "", ""]
    for chunk in stream_chunks(server, "/v1/completions", body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in whole["choices"]]


def test_token_prompts(server: LiveServer) -> None:
    for prompt in ([1, 2, 3], [[1, 2], [3]]):
        body = {"prompt": prompt, "max_tokens": 2}
        answer = server.web.post("/v1/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == 3


def test_one_bad_prompt_of_two_starts_nothing(server: LiveServer) -> None:
    seen = len(server.engine.seen)
    response = server.web.post("/v1/completions", json={"prompt": [[1], [10**6]]})
    assert response.status_code == 400
    assert len(server.engine.seen) == seen


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(server: LiveServer, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "stop"}], "stop": ["STOP"], "max_tokens": 50}
    if stream:
        chunks = stream_chunks(server, "/v1/chat/completions", body)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        end = chunks[-1]["choices"][0]
    else:
        end = server.web.post("/v1/chat/completions", json=body).json()["choices"][0]
        text = end["message"]["content"]
    assert text == "one "
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "STOP")
    server.wait_settled()


def test_seed_repeats_whatever_runs_beside(api: Any) -> None:
    def ask(seed: int | None) -> str:
        answer = api.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "s"}], seed=seed, max_tokens=10
        )
        return str(answer.choices[0].message.content)

    alone = ask(11)
    threads = [threading.Thread(target=ask, args=(None,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert ask(11) == alone
    for thread in threads:
        thread.join()
    assert ask(12) != alone


# ---- logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_cover_every_token_once(server: LiveServer, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "greet"}],
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
        "return_token_ids": True,
    }
    if stream:
        content, ids = [], []
        for chunk in stream_chunks(server, "/v1/chat/completions", body)[1:]:
            choice = chunk["choices"][0]
            content += choice["logprobs"]["content"]
            ids += choice["token_ids"]
            shown = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
            if choice["finish_reason"] is None:
                assert shown.decode() == choice["delta"]["content"]
    else:
        answer = server.web.post("/v1/chat/completions", json=body).json()
        content = answer["choices"][0]["logprobs"]["content"]
        ids = answer["choices"][0]["token_ids"]
        assert answer["prompt_token_ids"] == list(chat_ids("greet"))
    assert ids == SCRIPT[chat_ids("greet")]
    assert len(content) == 19
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode() == "Hello, wörld 😀<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["logprob"] == -0.5
    assert content[7]["token"] == "w"
    assert content[8]["token"] == "\ufffd"


def test_echo_with_logprobs(server: LiveServer) -> None:
    body = {"prompt": "abxy", "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
    choice = server.web.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("abxy")
    assert logprobs["tokens"][:4] == ["<s>", "ab", "x", "y"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == 7
    assert logprobs["text_offset"][:5] == [0, 0, 2, 3, 4]
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"]))[1:]:
        assert choice["text"][offset:].startswith(token)
    streamed: dict[str, list[Any]] = {k: [] for k in logprobs}
    text = ""
    for chunk in stream_chunks(server, "/v1/completions", body):
        text += chunk["choices"][0]["text"]
        for key in streamed:
            streamed[key] += chunk["choices"][0]["logprobs"][key]
    assert text == choice["text"]
    assert streamed == logprobs


def test_echo_of_a_message_without_content(server: LiveServer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    answer = server.web.post("/v1/chat/completions", json={"messages": turns, "echo": True})
    assert answer.status_code == 200, answer.text


def test_the_whole_vocabulary_in_logprobs() -> None:
    body = {"prompt": "abxy", "logprobs": -1, "prompt_logprobs": 2, "echo": True, "max_tokens": 2}
    with LiveServer(make_parts(info=make_info(max_logprobs=-1))) as live:
        choice = live.web.post("/v1/completions", json=body).json()["choices"][0]
        params = live.engine.seen[0].params
    assert (params.logprobs, params.prompt_logprobs) == (-1, -1)
    for top in choice["logprobs"]["top_logprobs"][-2:]:
        assert min(top.values()) == -264.5  # the last of 265


def test_scoring_a_prompt_without_generating(server: LiveServer) -> None:
    body = {"prompt": "abxy", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = server.web.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "abxy"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<s>", "ab", "x", "y"]
    assert answer["usage"]["completion_tokens"] == 0
    server.wait_settled()


def test_prompt_logprobs_has_an_entry_per_token(server: LiveServer) -> None:
    body = {"prompt": [5, 6, 7, 8, 9], "prompt_logprobs": 1, "max_tokens": 1}
    choice = server.web.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["prompt_logprobs"]) == 5
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["6"] == {
        "logprob": -1.0,
        "rank": 2,
        "decoded_token": "\x06",
    }


def test_tokens_as_ids(server: LiveServer) -> None:
    body = {"prompt": "greet", "logprobs": 0, "return_tokens_as_token_ids": True}
    choice = server.web.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["tokens"][0] == "token_id:72"


# ---- errors -------------------------------------------------------------------------------------

BAD_BODIES: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"guided_json": {}}, "guided_json"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": []}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages"),
    ({"priority": -5}, "priority"),
    ({"cache_salt": "../x"}, "cache_salt"),
    ({"session_id": "x" * 300}, "session_id"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), BAD_BODIES)
def test_bad_fields_are_named(server: LiveServer, change: dict[str, Any], param: str) -> None:
    seen = len(server.engine.seen)
    raw = json.dumps({**CHAT, **change})
    headers = {"content-type": "application/json"}
    response = server.web.post("/v1/chat/completions", content=raw, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert error["param"] == param
    assert len(response.content) < 8192
    assert len(server.engine.seen) == seen


def test_renamed_fields_name_their_replacement(server: LiveServer) -> None:
    response = server.web.post("/v1/chat/completions", json={**CHAT, "guided_regex": "x"})
    assert "structured_outputs" in response.json()["error"]["message"]


def test_neutral_values_of_refused_fields_are_fine(server: LiveServer) -> None:
    body = {
        **CHAT,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "u",
        "max_tokens": 1,
        "something_new": 1,
    }
    assert server.web.post("/v1/chat/completions", json=body).status_code == 200
    metrics = server.web.get("/metrics").text
    assert 'cardcage_unknown_fields_total{field="something_new"}' in metrics


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"messages": [], "temperature": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}", "application/json", 400),
        (b'{"n": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b'{"messages": [' + b"1," * 600_000 + b"1]}", "application/json", 413),
    ],
)
def test_bad_bodies(server: LiveServer, raw: bytes, kind: str, status: int) -> None:
    headers = {"content-type": kind} if kind else {}
    response = server.web.post("/v1/chat/completions", content=raw, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert len(response.content) < 8192


def test_a_body_without_a_length_is_limited_too(server: LiveServer) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 65536

    response = server.web.post(
        "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413


def test_errors_through_the_openai_client(api: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model="fake", messages=[], temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert missing.value.param == "model"
    assert "The model `nope` does not exist." in str(missing.value)


def test_context_too_long_has_both_numbers(server: LiveServer) -> None:
    error = server.web.post("/v1/completions", json={"prompt": [1] * 500}).json()["error"]
    assert "500 tokens" in error["message"]
    assert "256 tokens" in error["message"]
    assert error["param"] == "prompt"


def test_unknown_routes_and_methods(server: LiveServer) -> None:
    missing = server.web.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    wrong = server.web.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == 405


def test_strict_fields() -> None:
    with LiveServer(options={"strict_fields": True}) as live:
        response = live.web.post("/v1/chat/completions", json={**CHAT, "zzz": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "zzz"


# ---- headers ------------------------------------------------------------------------------------


def test_equal_request_ids_do_not_collide(server: LiveServer) -> None:
    answers: list[Any] = []

    def ask() -> None:
        response = server.web.post(
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 20},
            headers={"x-request-id": "same/../id"},
        )
        answers.append(response)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [a.json()["id"] for a in answers]
    assert ids[0] != ids[1]
    assert all(i.startswith("cmpl-same_.._id-") for i in ids)
    assert {a.headers["x-request-id"] for a in answers} == {"same_.._id"}


def test_priority_header() -> None:
    with LiveServer(make_parts(info=make_info(scheduler_policy="priority"))) as live:
        body = {"prompt": "x", "max_tokens": 1, "priority": 4}
        for headers, want in (({}, 4), ({"x-vllm-priority": "-2"}, -2)):
            assert live.web.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert live.engine.seen[-1].priority == want
        bad = live.web.post("/v1/completions", json=body, headers={"x-vllm-priority": "high"})
        assert bad.status_code == 400


def test_every_route_needs_the_key_but_the_open_ones() -> None:
    with LiveServer(api_keys=("first", "second")) as live:
        open_routes = {"/health", "/ping", "/version", "/metrics"}
        checked = 0
        for route in live.http.table:
            path = route.path.replace("{model:path}", "fake")
            status = live.web.request(route.method, path).status_code
            assert (status == 401) == (path not in open_routes), path
            checked += 1
        assert checked == 12
        denied = live.web.get("/anything")
        assert denied.status_code == 401
        assert denied.headers["www-authenticate"] == "Bearer"
        assert denied.json()["error"]["type"] == "AuthenticationError"
        with pytest.raises(openai.AuthenticationError):
            live.openai(api_key="wrong").models.list()
        assert live.openai(api_key="second").models.list().data[0].id == "fake"
        assert live.web.get("/v1/models", headers={"x-api-key": "first"}).status_code == 200


# ---- small routes -------------------------------------------------------------------------------


def test_models(server: LiveServer, api: Any) -> None:
    card = api.models.retrieve("fake")
    assert card.id == "fake"
    assert card.max_model_len == 256
    assert server.web.get("/v1/models/other").status_code == 404


def test_tokenize_and_back(server: LiveServer) -> None:
    answer = server.web.post(
        "/tokenize", json={"prompt": "ab hello", "return_token_strs": True}
    ).json()
    assert answer["token_strs"] == ["<s>", "ab", " hello"]
    assert answer["count"] == 3
    assert answer["max_model_len"] == 256
    text = server.web.post("/detokenize", json={"tokens": answer["tokens"][1:]}).json()
    assert text == {"prompt": "ab hello"}
    chat = server.web.post("/tokenize", json=CHAT).json()
    assert chat["tokens"] == list(chat_ids("hi"))
    assert server.web.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert server.web.post("/tokenize", json={}).status_code == 400


def test_health_version_load(server: LiveServer) -> None:
    assert server.web.get("/health").content == b""
    assert server.web.post("/ping").status_code == 200
    assert server.web.get("/version").json()["version"]
    assert server.web.get("/load").json() == {"server_load": 0}


def test_starting_server_answers_503() -> None:
    with LiveServer(ready=False) as live:
        assert live.web.get("/version").status_code == 200
        for method, path in (("GET", "/health"), ("GET", "/v1/models")):
            response = live.web.request(method, path)
            assert response.status_code == 503
            assert "starting" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert live.web.post("/v1/chat/completions", json=CHAT).status_code == 503


def test_metrics_names_and_counts() -> None:
    with LiveServer() as live:
        names = {f.name for f in text_string_to_metric_families(live.web.get("/metrics").text)}
        assert {
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:request_success",
            "vllm:prompt_tokens",
            "vllm:generation_tokens",
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:e2e_request_latency_seconds",
            "http_requests",
        } <= names
        live.web.post("/v1/chat/completions", json={**CHAT, "n": 4, "max_tokens": 3})
        text = live.web.get("/metrics").text
        samples = {
            (s.name, s.labels.get("finished_reason")): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
        }
        assert samples["vllm:request_success_total", "length"] == 1
        assert samples["vllm:request_success_total", "abort"] == 0
        assert samples["vllm:generation_tokens_total", None] == 12
        assert samples["vllm:request_generation_tokens_sum", None] == 12
        assert samples["vllm:inter_token_latency_seconds_count", None] == 8
        assert samples["vllm:num_requests_running", None] == 0


# ---- leaving, waiting, failing ------------------------------------------------------------------


def raw_post(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def test_two_hundred_cancelled_streams_leave_nothing() -> None:
    with LiveServer(step_s=0.001, num_blocks=16, max_seqs=16) as live:
        before = live.tasks()
        for start in range(0, 200, 20):
            connections = [
                raw_post(
                    live,
                    {
                        **CHAT,
                        "max_tokens": 200,
                        "stream": i % 3 != 0,
                        "n": 1 + i % 2,
                        "logprobs": i % 5 == 0,
                    },
                )
                for i in range(start, start + 20)
            ]
            for i, connection in enumerate(connections):
                if i % 2 and i % 3:
                    connection.recv(200)
                connection.close()
        live.wait_settled(5)
        wait_for(lambda: live.tasks() == before)
        assert live.web.get("/load").json() == {"server_load": 0}
        assert live.web.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_slow_reader_blocks_nobody() -> None:
    info = make_info(max_model_len=60_000)
    with LiveServer(make_parts(info=info), options={"write_timeout_s": 2.0}) as live:
        slow = raw_post(live, {**CHAT, "max_tokens": 50_000, "stream": True, "logprobs": True})
        for _ in range(5):
            answer = live.web.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5})
            assert answer.status_code == 200
        live.wait_settled(10)  # it is aborted, or merged and done
        slow.close()


def test_a_queue_that_is_full_is_503_before_the_stream_starts() -> None:
    with LiveServer(step_s=0.02, max_seqs=1, max_queue=1) as live:
        held = []
        for count in (1, 2):  # one runs, one waits
            held.append(raw_post(live, {**CHAT, "max_tokens": 200, "stream": True}))
            wait_for(lambda: live.engine.free_blocks < live.engine.num_blocks)
            wait_for(lambda count=count: len(live.engine.seen) == count)
        response = live.web.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        for connection in held:
            connection.close()
        live.wait_settled()


def test_an_engine_that_dies_ends_streams_with_an_error_event() -> None:
    with LiveServer(step_s=0.01, fail_at_step=5) as live:
        response = live.web.post(
            "/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 100}
        )
        found = events(response)
        assert found[-1] == "[DONE]"
        error = json.loads(found[-2])["error"]
        assert error["code"] == 500
        assert "told to fail" not in error["message"]
        assert live.web.get("/health").status_code == 503
        assert live.web.post("/v1/chat/completions", json=CHAT).status_code == 500


def test_keep_alive_comments_fill_silence() -> None:
    with LiveServer(options={"sse_keep_alive_s": 0.03}, step_s=0.2) as live:
        body = {**CHAT, "stream": True, "max_tokens": 3, "temperature": 0}
        text = live.web.post("/v1/chat/completions", json=body).text
        assert text.count(": keep-alive\n\n") >= 3
        assert text.endswith("data: [DONE]\n\n")
        plain = live.web.post("/v1/chat/completions", json={**body, "stream": False}).json()
        shown = [
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            for line in text.split("\n\n")
            if line.startswith("data: {")
        ]
        assert "".join(shown) == plain["choices"][0]["message"]["content"]


def test_a_client_that_reads_nothing_is_aborted() -> None:
    import asyncio

    from cardcage.plugins.frontends.openai_http.sse import EventStream

    cancelled: list[bool] = []

    class Endless:
        def cancel(self) -> None:
            cancelled.append(True)

    async def forever() -> Any:
        while True:
            yield b"data: x\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        stream: Any = Endless()
        answer = EventStream(forever(), [stream], "id", write_timeout_s=0.05)
        await asyncio.wait_for(answer({}, receive, send), 2)

    asyncio.run(main())
    assert cancelled
