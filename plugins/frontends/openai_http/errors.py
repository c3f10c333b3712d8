"""Exceptions to the API's error object and status."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import Response
from pydantic import ValidationError

from cardcage.core.errors import AdmissionError, EngineError, RequestError

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLarge",
    415: "UnsupportedMediaType",
    503: "ServiceUnavailableError",
}
_MAX_MESSAGE = 1000
_MAX_VALUE = 200
_MAX_ERRORS = 10


class ApiError(Exception):
    """An answer that is an error: status, message, and the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


def to_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """What a client is told of an exception: engine failures say little, mistakes say all."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AdmissionError):
        return ApiError(503, str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, RequestError):
        return ApiError(error.status, str(error), error.param)
    where = f" (request {request_id})" if request_id else ""
    if isinstance(error, EngineError):
        return ApiError(500, f"the engine failed on this request{where}; see the server's log")
    return ApiError(500, f"the server failed on this request{where}; see its log")


def error_object(error: ApiError) -> dict[str, Any]:
    """The body: {"error": {message, type, param, code}}, bounded in size."""
    message = str(error)
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    fallback = "BadRequestError" if error.status < 500 else "InternalServerError"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.status,
        }
    }


def error_response(error: ApiError) -> Response:
    """The whole HTTP answer."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    # ASCII: a message may quote half a surrogate pair, which has no UTF-8 form.
    body = json.dumps(error_object(error))
    return Response(body, error.status, headers, media_type="application/json")


def from_validation(error: ValidationError) -> ApiError:
    """A pydantic error as one sentence: the first field is `param`, at most ten are told."""
    problems = error.errors(include_url=False, include_context=False)
    lines = []
    for problem in problems[:_MAX_ERRORS]:
        value = repr(problem.get("input"))
        if len(value) > _MAX_VALUE:
            value = value[: _MAX_VALUE - 3] + "..."
        lines.append(f"{_path(problem['loc'])}: {problem['msg']}, got {value}")
    if len(problems) > _MAX_ERRORS:
        lines.append(f"and {len(problems) - _MAX_ERRORS} more")
    paths = [_path(problem["loc"]) for problem in problems]
    root = paths[0].split(".")[0]  # a union reports each branch: the deepest says most
    deepest = max((p for p in paths if p.split(".")[0] == root), key=lambda p: p.count("."))
    return ApiError(400, "; ".join(lines), deepest)


def _path(loc: tuple[int | str, ...]) -> str:
    """Dotted field path, without the names of the framework's union branches."""
    parts = [str(p) for p in loc if isinstance(p, int) or not any(c in p for c in "[]()")]
    while len(parts) > 1 and parts[-1] in ("str", "int", "float", "bool", "list", "dict"):
        parts.pop()
    return ".".join(parts)
