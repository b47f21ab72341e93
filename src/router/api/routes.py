"""One family's routes: path, body, answer and span, declared once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel

from router.api.errors import family_of
from router.api.openapi.answers import StreamForm
from router.api.openapi.openapi import documented
from router.tracing import name_span

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class Routes(APIRouter):
    """A router whose handlers read bodies themselves."""

    def __init__(self, tag: str, *, is_fast: bool = False) -> None:
        super().__init__(tags=[tag])
        # Bodies and events of its routes.
        self.models: list[type[BaseModel]] = []
        # Fixed paths go past the framework (`router.api.http.fast_path`).
        self.is_fast = is_fast

    def answers(
        self,
        path: str,
        bodies: type[BaseModel] | tuple[type[BaseModel], ...],
        response: Any,
        *,
        span: str,
        event: type[BaseModel] | None = None,
        stream: StreamForm = "done",
        headers: Sequence[str] = (),
        generates: bool = True,
    ) -> Callable[[Handler], Handler]:
        """Declare a POST route.

        Args:
            response: JSON; None: it only streams.
            event: Of its stream.
            stream: How that ends.
            span: TGI's name.
            headers: Of the JSON answer.
        """
        accepted = bodies if isinstance(bodies, tuple) else (bodies,)
        self.models += [*accepted, *([event] if event is not None else [])]

        def register(handler: Handler) -> Handler:
            name_span(handler, span)
            family = family_of(path)
            options = documented(
                accepted,
                response,
                event=event,
                stream=stream,
                headers=headers,
                generates=generates,
                family=family,
            )
            self.add_api_route(path, handler, methods=["POST"], **options)
            return handler

        return register

    def describes(self, *paths: str, span: str = "", **options: Any) -> Callable[[Handler], Handler]:
        """Declare a GET route that answers HEAD too."""

        def register(handler: Handler) -> Handler:
            name_span(handler, span)
            for path in paths:
                self.add_api_route(path, handler, methods=["GET"], **options)
                self.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **options)
            return handler

        return register
