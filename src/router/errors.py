"""The router's exceptions. Each carries TGI's stable `error_type`; `router.api.errors` maps it to a status.

RouterError
├── ValidationError       422  validation
│   ├── BatchSizeError    422  batch size exceeded
│   └── SuffixError       422  suffix not supported
├── TemplateError         422  template_error
├── ToolError             422  tool_error
├── OverloadedError       429  overloaded
├── GenerationError       424  generation
├── IncompleteError       500  incomplete_generation
├── UnhealthyError        503  healthcheck
└── StartupError          (never reaches a client: ends the process with one line)
    ├── ArgumentValidation    options that contradict each other or the shards
    └── BackendError          the shards cannot be reached, or not warmed up
"""

from __future__ import annotations

from wire.text.escape import quoted


class RouterError(Exception):
    """An error with a public message, `str(error)`."""

    error_type = "internal"


class ValidationError(RouterError):
    """The request itself is at fault. Takes the detail; the public message gets TGI's prefix."""

    error_type = "validation"

    def __init__(self, detail: str) -> None:
        super().__init__(f"Input validation error: {detail}")


class BatchSizeError(ValidationError):
    """More prompts, choices or instances than one request may hold."""

    error_type = "batch size exceeded"


class SuffixError(ValidationError):
    """A completion with a `suffix`."""

    error_type = "suffix not supported"


class TemplateError(RouterError):
    """The chat template could not be rendered, or there is none."""

    error_type = "template_error"

    def __init__(self, detail: str) -> None:
        super().__init__(f"Template error: {detail}")


class ToolError(RouterError):
    """Tools or tool output that cannot be honoured."""

    error_type = "tool_error"

    def __init__(self, detail: str) -> None:
        super().__init__(f"Tool error: {detail}")


class OverloadedError(RouterError):
    """No permit is free. `retry_after_s` is an estimate from the observed drain of the queue."""

    error_type = "overloaded"

    def __init__(self, retry_after_s: int = 1) -> None:
        super().__init__("Model is overloaded")
        self.retry_after_s = retry_after_s


class GenerationError(RouterError):
    """The shards failed while the request ran. Takes their message."""

    error_type = "generation"

    def __init__(self, detail: str) -> None:
        super().__init__(f"Request failed during generation: {detail}")


class IncompleteError(RouterError):
    """The generation ended without a last token."""

    error_type = "incomplete_generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class UnhealthyError(RouterError):
    """A shard does not answer, or the scheduler has stopped."""

    error_type = "healthcheck"

    def __init__(self) -> None:
        super().__init__("unhealthy")


class StartupError(RouterError):
    """The router cannot start; the message names the cause and, where there is one, the flag to change."""

    error_type = "startup"
    variant = "WebServer"
    """TGI's name for the kind of failure, which log scrapers match."""

    def report(self) -> str:
        """The last line on standard error, in TGI's form."""
        return f"Error: {self.variant}({quoted(str(self))})"


class ArgumentValidation(StartupError):
    variant = "ArgumentValidation"


class BackendError(StartupError):
    variant = "Backend"
