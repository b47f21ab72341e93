"""A router that fails on demand: the real HTTP routes in front of a scheduler that plays a script.

A healthy model server never gives a client 424 or 500, so the words of the prompt choose the failure here. Every POST
needs the key. Arguments: port, key; `tests/unit/router` must be on the path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvicorn
from hostile_answer import HOSTILE
from router_fakes import Router, failing, says
from tokenizers import Tokenizer

from router.config import RouterConfig
from router.errors import GenerationError, IncompleteError
from router.events import Event
from router.request import ValidRequest
from wire import demo_model


def script(request: ValidRequest) -> Sequence[Event | None]:
    """`break down`: a failure of the shards; `stop short`: an end without a last token; both after some tokens.
    `attack`: an answer that attacks who shows it as HTML."""
    if "break down" in request.inputs:
        return failing("one", " two", error=GenerationError("Server error: out of memory"))
    if "stop short" in request.inputs:
        return failing("one", " two", error=IncompleteError())
    if "attack" in request.inputs:
        return says(*(HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)))
    return says("one", " two")


def main() -> None:
    port, key = int(sys.argv[1]), sys.argv[2]
    tokenizer = Tokenizer.from_file(str(demo_model.path() / "tokenizer.json"))
    router = Router(tokenizer, script, config=RouterConfig(tokenizer_name="faulty", api_key=key))
    uvicorn.run(router.app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
