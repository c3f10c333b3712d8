"""Chat templates: helpers, content forms, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cardcage.core.errors import InvalidRequest
from cardcage.core.text.renderer import Renderer

PLAIN = (
    "{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "<{{ part.type }}:{{ part.text }}>{% endfor %}{% endfor %}"
)
MIXED = (
    "{% for m in messages %}{% set content = m.content %}{% if content is string %}s:{{ content }}"
    "{% else %}{% for p in content %}p:{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def test_plain_template() -> None:
    renderer = Renderer(PLAIN)
    assert renderer.render(USER) == "[user]hi[assistant]"
    assert renderer.render(USER, add_generation_prompt=False) == "[user]hi"


def test_content_takes_the_form_that_the_template_reads() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = [{"role": "user", "content": parts}]
    assert Renderer(PLAIN).render(message, add_generation_prompt=False) == "[user]a\nb"
    assert Renderer(PARTS).render(message) == "[user]<text:a><text:b>"
    assert Renderer(PARTS).render(USER) == "[user]<text:hi>"
    assert Renderer(MIXED).render(USER) == "s:hi"
    assert Renderer(MIXED).render(message) == "p:ap:b"


def test_developer_becomes_system_unless_the_template_knows_it() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert Renderer(PLAIN).render(message).startswith("[system]")
    assert Renderer(PLAIN + "{# developer #}").render(message).startswith("[developer]")


def test_helpers_of_templates() -> None:
    source = (
        "{{ messages[0] | tojson }}{{ strftime_now('%Y') }}{{ bos_token }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}g{% endgeneration %}"
    )
    renderer = Renderer(source, {"bos_token": "<s>"}, strftime_now=lambda form: "now")
    text = renderer.render([{"role": "user", "content": "<é>"}])
    assert text == '{"role": "user", "content": "<é>"}now<s>01g'


def test_lines_of_blocks_leave_no_blanks() -> None:
    source = "{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n"
    assert Renderer(source).render(USER) == "x\n"


def test_a_template_may_refuse() -> None:
    renderer = Renderer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        renderer.render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nope.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_failures_and_escapes_are_invalid_requests(source: str) -> None:
    with pytest.raises(InvalidRequest):
        Renderer(source).render(USER)


def test_a_broken_template_is_named() -> None:
    with pytest.raises(InvalidRequest, match="does not compile"):
        Renderer("{% for %}")


def test_continuing_the_last_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "Well,  "}]
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    text = Renderer(source).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "[user]hi</s>[assistant]Well,  "
    with pytest.raises(InvalidRequest, match="exclude each other"):
        Renderer(source).render(messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not show"):
        Renderer("x").render(messages, add_generation_prompt=False, continue_final_message=True)


def test_kwargs_reach_the_template_only_when_it_reads_them() -> None:
    renderer = Renderer("{{ flag }}|{{ other }}", defaults={"other": 1, "flag": 0})
    assert renderer.render(USER, kwargs={"flag": True, "unused": 1}) == "True|1"
    for name in ("chat_template", "messages", "tools", "tokenize", "bos_token"):
        with pytest.raises(InvalidRequest, match=name):
            renderer.render(USER, kwargs={name: 1})


def test_long_results_are_refused() -> None:
    renderer = Renderer("{% for i in range(100) %}aaaaaaaaaa{% endfor %}", max_chars=500)
    with pytest.raises(InvalidRequest, match="1000 characters, more than 500"):
        renderer.render(USER)


def test_tool_calls_of_history_are_parsed() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    source = (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.arguments.a + 1 }}{% else %}{{ m.tool_call_id }}{% endif %}"
        "{% endfor %}"
    )
    assert Renderer(source).render(messages) == "2c1"
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(InvalidRequest) as caught:
        Renderer(source).render(messages)
    assert caught.value.param == "messages.0.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("x", "messages.0"),
        ({"role": "robot", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": [5]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0.type"),
        ({"role": "user", "content": "x", "name": 4}, "messages.0.name"),
        ({"role": "assistant", "tool_calls": "x"}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls.0.function"),
    ],
)
def test_malformed_messages_are_named(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Renderer(PLAIN).render([message])
    assert caught.value.param == param
