"""Random pictures on the routes that take them, a third of them harmful: every sound one is read."""

from __future__ import annotations

import asyncio
import base64
import random
from collections import Counter
from typing import Any

import httpx
import orjson
from hostile.answers import check
from hostile.attacks.bodies import asked
from hostile.random_bodies import MARK
from hostile.target import Target
from support.harmful_pictures import random_picture

_AT_ONCE = 8
_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/tiff", "image/svg+xml", "text/html", "")
_URLS = (
    "http://127.0.0.1:1/x.png", "http://[::1]/", "http://169.254.169.254/latest", "http://2130706433/", "http://0/",
    "http://[::ffff:127.0.0.1]/", "http://user@127.0.0.1/", "http://127.0.0.1\\@x/", "file:///etc/passwd", "http://",
    "https://localhost/x", "ftp://x/y", "data:", "data:image/png", "data:;;base64,", "data:image/png;base64,*",
    "data:image/png;base64,====", "data:image/png;utf8,x",
)  # fmt: skip


_STATUSES = {"sound": (200, 429), "rare": (200, 400, 422, 429), "harmful": (400, 422, 429)}
"""400: what OpenAI's and Anthropic's routes say for 422. 429: too many others wait."""


async def random_pictures(target: Target, source: random.Random, count: int) -> Counter[str]:
    """So many pictures, one to three in a request."""
    statuses: Counter[str] = Counter()
    left = iter(range(count))

    async def ask(client: httpx.AsyncClient, own: random.Random) -> None:
        for _ in left:
            pictures = [_picture(own)]
            while own.random() < 0.2 and len(pictures) < 3 and next(left, None) is not None:
                pictures.append(_picture(own))
            path, body = _request(own, [url for _, url in pictures])
            answer = await asked(client, path, orjson.dumps(body), {"content-type": "application/json"})
            kinds = {kind for kind, _ in pictures}
            kind = "harmful" if "harmful" in kinds else "rare" if "rare" in kinds else "sound"
            statuses[f"{kind} {answer.status_code}"] += 1
            statuses["pictures"] += len(pictures)
            try:
                check(answer)
                assert answer.status_code in _STATUSES[kind]
            except Exception as error:
                raise AssertionError(f"{path} {str(body)[:2000]}: {answer.text[:500]} {error}") from error

    async with target.client() as client:
        await asyncio.gather(*(ask(client, random.Random(source.random())) for _ in range(_AT_ONCE)))
    return statuses


def _picture(source: random.Random) -> tuple[str, str]:
    """Its kind and its URL, at times that of a host that may not be reached."""
    if source.random() < 0.1:
        return "harmful", source.choice(_URLS)
    kind, data = random_picture(source)
    return kind, f"data:{source.choice(_TYPES)};base64,{base64.b64encode(data).decode()}"


def _request(source: random.Random, urls: list[str]) -> tuple[str, Any]:
    words = source.choice(["", f"What is this, {MARK}?"])
    few: dict[str, Any] = {"max_tokens": source.randrange(1, 5), "stream": source.random() < 0.3}
    # A marker with another URL would be text.
    is_marker = all(url.startswith(("http://", "https://", "data:")) and ")" not in url for url in urls)
    route = source.choice(["native", "completions", "chat", "messages", "tokenize"]) if is_marker else "chat"
    marked = "".join(f"![]({url})" for url in urls) + words
    if route == "native":
        return source.choice(["/generate", "/generate_stream"]), {
            "inputs": marked, "parameters": {"max_new_tokens": source.randrange(1, 5)},
        }  # fmt: skip
    if route == "completions":
        return "/v1/completions", {"model": "tgi", "prompt": marked, "n": source.randrange(1, 3), **few}
    if route == "tokenize":
        return "/tokenize", {"inputs": marked}
    if route == "chat":
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": [*parts, _text(words)]}], **few}
    blocks = [{"type": "image", "source": _source(url)} for url in urls]
    content = [*blocks, _text(words or "x")]
    return "/v1/messages", {"model": "tgi", "messages": [{"role": "user", "content": content}], **few}


def _text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def _source(url: str) -> dict[str, str]:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    if url.startswith("data:") and data:
        return {"type": "base64", "media_type": kind or "image/png", "data": data}
    return {"type": "url", "url": url}
