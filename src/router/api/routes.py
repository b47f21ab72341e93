"""The routes of one family, each declared once: path, body and answer for the OpenAPI document, span for the traces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel

from router.api.errors import family_of
from router.api.openapi.openapi import documented
from router.tracing import name_span

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class Routes(APIRouter):
    """A router whose handlers read their bodies themselves.

    `models`: the bodies and events of its routes, which no handler's signature names. `is_fast`: requests to its fixed
    paths go past the framework (`router.api.http.fast_path`).
    """

    def __init__(self, tag: str, *, is_fast: bool = False) -> None:
        super().__init__(tags=[tag])
        self.models: list[type[BaseModel]] = []
        self.is_fast = is_fast

    def answers(
        self,
        path: str,
        bodies: type[BaseModel] | tuple[type[BaseModel], ...],
        response: Any,
        *,
        span: str,
        event: type[BaseModel] | None = None,
        headers: Sequence[str] = (),
        generates: bool = True,
    ) -> Callable[[Handler], Handler]:
        """A POST route. `response`: the JSON answer, None if it only streams; `event`: of its stream if it has one.

        `span` is TGI's name; `headers` are those of the JSON answer.
        """
        accepted = bodies if isinstance(bodies, tuple) else (bodies,)
        self.models += [*accepted, *([event] if event is not None else [])]

        def register(handler: Handler) -> Handler:
            name_span(handler, span)
            family = family_of(path)
            options = documented(accepted, response, event=event, headers=headers, generates=generates, family=family)
            self.add_api_route(path, handler, methods=["POST"], **options)
            return handler

        return register

    def describes(self, *paths: str, span: str = "", **options: Any) -> Callable[[Handler], Handler]:
        """A GET route that answers HEAD too; the documentation names it once."""

        def register(handler: Handler) -> Handler:
            name_span(handler, span)
            for path in paths:
                self.add_api_route(path, handler, methods=["GET"], **options)
                self.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **options)
            return handler

        return register
