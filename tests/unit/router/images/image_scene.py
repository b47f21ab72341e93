"""The router's routes for a model that reads images, which are prepared in the test's own process."""

from __future__ import annotations

import base64
from typing import Any

from router_fakes import Router, message_of
from support.image_fakes import Images
from support.pictures import picture

from router.request import ValidRequest

PER_IMAGE = 16
ITERATES = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def data_url(*arguments: Any, **options: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(*arguments, **options)).decode()}"


class Scene:
    def __init__(self, router: Router, images: Images, token_id: int) -> None:
        self.router, self.images, self.token_id = router, images, token_id

    @property
    def last(self) -> ValidRequest:
        return self.router.scheduler.last

    @property
    def submitted(self) -> list[ValidRequest]:
        return self.router.scheduler.submitted

    async def post(self, path: str, **body: Any) -> Any:
        return await self.router.post(path, body)

    async def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        answer = await self.router.post(path, body)
        self.router.assert_idle()
        return answer.status_code, message_of(answer)
