"""One exception tree for everything that Cardcage raises on purpose.

    EngineError
    ├── ConfigError            a config file, variable or flag is wrong
    ├── PluginError            a plugin cannot be found, loaded or used
    │   ├── SelectionError     no candidate fits; carries the table of reasons
    │   ├── PluginLoadError    importing or building it failed
    │   └── PlanMismatch       a child process sees another plugin than its parent
    ├── ModelError             a model reference, config or checkpoint is unusable
    │   ├── UnsupportedModel   nothing installed describes this architecture
    │   └── CheckpointError    truncated, corrupt, missing or unexpected tensors
    ├── RequestError           one request is at fault; others go on
    │   ├── InvalidRequest     a field is out of range (HTTP 400)
    │   ├── ContextTooLong     the prompt does not fit the context (HTTP 400)
    │   └── AdmissionError     the queue is full or the server drains (HTTP 503)
    ├── ResourceError          not enough memory for what was asked
    └── ExecutionError         a step failed
        └── EngineDead         the engine cannot go on

A message says what failed, the value it got, what is allowed, and what to do.
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of the tree: any failure that Cardcage explains itself."""


class ConfigError(EngineError):
    """A config value is wrong; the message names file, path and nearest key."""


class PluginError(EngineError):
    """A plugin cannot be found, loaded or used."""


class SelectionError(PluginError):
    """No candidate fits. `table` is the explained decision as text."""

    def __init__(self, message: str, table: str = "") -> None:
        super().__init__(f"{message}\n{table}" if table else message)
        self.table = table


class PluginLoadError(PluginError):
    """Importing or building a plugin failed; `__cause__` keeps the plugin's own exception."""


class PlanMismatch(PluginError):
    """A child process resolved a plugin to other code than its parent did."""


class ModelError(EngineError):
    """A model reference, config or checkpoint is unusable."""


class UnsupportedModel(ModelError):
    """No installed model plugin describes this architecture."""


class CheckpointError(ModelError):
    """A checkpoint is truncated, corrupt, or its tensors do not match the model."""


class RequestError(EngineError):
    """One request is at fault. `param` is the field's name as the client wrote it, or None."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError, ValueError):
    """A request field is out of range or contradictory."""


class ContextTooLong(RequestError, ValueError):
    """The prompt leaves no room in the model's context."""


class AdmissionError(RequestError):
    """The engine takes no more requests now. `retry_after_s` says when to try again."""

    status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ResourceError(EngineError):
    """Not enough memory (or another resource) for what was asked; says what would fit."""


class ExecutionError(EngineError):
    """A step failed on the executor. `rows` are the plan rows concerned, None for all."""

    def __init__(self, message: str, rows: tuple[int, ...] | None = None) -> None:
        super().__init__(message)
        self.rows = rows


class EngineDead(ExecutionError):
    """The engine cannot go on; every request in flight has failed with the cause named."""
