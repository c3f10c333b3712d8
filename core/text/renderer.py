"""Conversations to prompt text, through the model's own chat template.

Templates are code from a model's files: they run in jinja2's immutable sandbox. A template that
a client sends is refused. Messages are checked before rendering, so that a mistake is reported
with the field's name.

Source: Hugging Face `apply_chat_template` documentation (variables and helpers that templates
may use); OpenAI API reference (messages).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from cardcage.core.errors import InvalidRequest

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = frozenset({"chat_template", "tokenize", "messages", "tools", "documents"})
_END_MARK = "\ue000cardcage-end\ue001"  # private-use characters: no message holds them by chance


class _Generation(Extension):
    """`{% generation %}`: marks assistant text for training masks; here its body as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusal(jinja2.TemplateError):
    """A template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return time.strftime(form)


def _environment(now: Callable[[str], str]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = now
    return env


def _iterates_content(tree: nodes.Template) -> bool:
    """True when the template loops over a message's content (it wants a list of parts)."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter) and node.node is not None:
            return is_content(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Getattr) and node.attr == "content"

    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node)
    }
    for loop in tree.find_all(nodes.For):
        if is_content(loop.iter):
            return True
        if isinstance(loop.iter, nodes.Name) and loop.iter.name in names:
            return True
    return False


class Renderer:
    """Renders conversations with one template, compiled once. Thread-safe.

    Args:
        template: jinja source.
        special_tokens: bos_token, eos_token, ... as text, offered to the template.
        max_chars: a rendered prompt above this is refused before it is tokenized.
        defaults: template variables that requests may override.

    Raises:
        InvalidRequest: `chat_template` when the template itself does not compile.
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_chars: int = 1 << 20,
        defaults: Mapping[str, Any] | None = None,
        strftime_now: Callable[[str], str] = _strftime_now,
    ) -> None:
        env = _environment(strftime_now)
        try:
            tree = env.parse(template)
            self._template = env.from_string(template)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template does not compile: {error}", "messages"
            ) from error
        self.source = template
        self.max_chars = max_chars
        self._special = dict(special_tokens or {})
        self._defaults = dict(defaults or {})
        self._variables = jinja2.meta.find_undeclared_variables(tree)
        self._wants_parts = _iterates_content(tree)
        tests = {test.name for test in tree.find_all(nodes.Test)}
        self._takes_strings = not self._wants_parts or "string" in tests
        self._knows_developer = "developer" in template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            InvalidRequest: a message is malformed, the template refused it, or the text is
                longer than `max_chars`; `param` names the field.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: set one "
                "of them to false",
                "continue_final_message",
            )
        checked = self.normalise(messages)
        if continue_final_message:
            self._mark_end(checked)
        variables = self._merge(kwargs or {})
        try:
            text = self._template.render(
                messages=checked, add_generation_prompt=add_generation_prompt, **variables
            )
        except _TemplateRefusal as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {str(error)[:500]}", "messages"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError,
                OverflowError, ZeroDivisionError, RecursionError) as error:  # fmt: skip
            raise InvalidRequest(
                f"the chat template failed on these messages: "
                f"{type(error).__name__}: {str(error)[:300]}",
                "messages",
            ) from error
        if continue_final_message:
            text = self._cut(text)
        if len(text) > self.max_chars:
            raise InvalidRequest(
                f"the rendered prompt has {len(text)} characters, more than {self.max_chars}; "
                "send fewer or shorter messages",
                "messages",
            )
        return text

    def _merge(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name in kwargs:
            if name in RESERVED or name in ("add_generation_prompt", "bos_token", "eos_token"):
                raise InvalidRequest(
                    f"chat_template_kwargs must not hold {name!r}: use the request's own field",
                    "chat_template_kwargs",
                )
        merged: dict[str, Any] = {"tools": None, "documents": None, **self._special}
        for name, value in {**self._defaults, **kwargs}.items():
            if name in self._variables:  # what the template never reads is not passed
                merged[name] = value
        return merged

    def _mark_end(self, messages: list[dict[str, Any]]) -> None:
        last = messages[-1]
        if last["role"] not in ("assistant", "user"):
            raise InvalidRequest(
                f"continue_final_message needs a user or assistant message at the end, "
                f"not {last['role']!r}",
                "continue_final_message",
            )
        content = last.get("content")
        if isinstance(content, list):
            content[-1] = {**content[-1], "text": content[-1]["text"] + _END_MARK}
        else:
            last["content"] = (content or "") + _END_MARK

    def _cut(self, text: str) -> str:
        at = text.rfind(_END_MARK)
        if at < 0:
            raise InvalidRequest(
                "the chat template does not show the last message, so it cannot be continued",
                "continue_final_message",
            )
        return text[:at]

    def normalise(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Checked copies of the messages in the form that the template reads."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise InvalidRequest("messages must be a list of objects", "messages")
        if not messages:
            raise InvalidRequest("messages must not be empty", "messages")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has {len(messages)} entries, more than {MAX_MESSAGES}", "messages"
            )
        return [self._message(m, f"messages.{i}") for i, m in enumerate(messages)]

    def _message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} must be an object", where)
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(
                f"{where}.role must be one of {', '.join(ROLES)}, got {str(role)[:50]!r}",
                f"{where}.role",
            )
        out: dict[str, Any] = {"role": role}
        if role == "developer" and not self._knows_developer:
            out["role"] = "system"
        calls = message.get("tool_calls")
        content = message.get("content")
        if content is None and (role != "assistant" or not calls):
            raise InvalidRequest(
                f"{where}.content is missing: it must be a string or a list of parts",
                f"{where}.content",
            )
        out["content"] = self._content(content, f"{where}.content")
        if calls is not None:
            out["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        for name in ("name", "tool_call_id", "reasoning_content", "refusal"):
            value = message.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise InvalidRequest(f"{where}.{name} must be a string", f"{where}.{name}")
                out[name] = value
        reasoning = message.get("reasoning")
        if isinstance(reasoning, str):
            out["reasoning_content"] = reasoning
        return out

    def _content(self, content: Any, where: str) -> Any:
        if content is None:
            return None if self._takes_strings else []
        if isinstance(content, str):
            return content if self._takes_strings else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
            raise InvalidRequest(f"{where} must be a string or a non-empty list of parts", where)
        texts = [_part_text(part, f"{where}.{i}") for i, part in enumerate(content)]
        if self._wants_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} must be an object with a type", where)
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
        return text
    raise InvalidRequest(
        f"{where}.type {str(kind)[:50]!r} is not supported: this model takes text parts only",
        f"{where}.type",
    )


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidRequest(f"{where} must be a list", where)
    out = []
    for i, call in enumerate(calls):
        at = f"{where}.{i}.function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{at} must be an object with a name", at)
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(
                    f"{at}.arguments is not JSON: {str(error)[:100]}", f"{at}.arguments"
                ) from error
        copied = {"type": "function", "function": {**function, "arguments": arguments}}
        if isinstance(call.get("id"), str):
            copied["id"] = call["id"]
        out.append(copied)
    return out
