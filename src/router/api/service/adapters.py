"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, within `--lora-root`."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from router.api.app_state import AppState, state_of
from router.api.errors import BodyError
from router.api.routes import Routes
from router.api.service.schema import LoadAdapterBody, UnloadAdapterBody
from router.errors import GenerationError
from router.lora.registry import AdapterLost, AdapterRefused
from wire.adapters import check_name

routes = Routes("Adapters")
routes.models += [LoadAdapterBody, UnloadAdapterBody]


@routes.post("/v1/load_lora_adapter", include_in_schema=False)
async def load_lora_adapter(request: Request) -> Response:
    """Register the adapter in a folder below --lora-root under a name. It is loaded when a request needs it."""
    state = state_of(request)
    body = await state.read(request, LoadAdapterBody, counts=False)
    name, path = body.lora_name, body.lora_path
    if not name or not path:
        raise _refused("Both 'lora_name' and 'lora_path' must be provided.")
    try:
        check_name(name, ValueError, taken=(*state.model_names, state.model_id))
    except ValueError as error:
        raise _refused(str(error)) from None
    adapters = state.inference.adapters
    if name in adapters and (adapters.path_of(name) is None or not body.load_inplace):
        hint = "" if adapters.path_of(name) is None else ", or set 'load_inplace' to true"
        raise _refused(f"The lora adapter '{name}' has already been loaded: choose another name{hint}.")
    folder = _below_root(state, path)
    try:
        await adapters.register(name, folder, replaces=body.load_inplace)
    except AdapterRefused as error:
        raise _refused(str(error)) from None
    except AdapterLost as error:
        raise GenerationError(str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@routes.post("/v1/unload_lora_adapter", include_in_schema=False)
async def unload_lora_adapter(request: Request) -> Response:
    """Forget a registered adapter. Requests that have it run to their end."""
    state = state_of(request)
    body = await state.read(request, UnloadAdapterBody, counts=False)
    if not body.lora_name:
        raise _refused("'lora_name' needs to be provided to unload a LoRA adapter.")
    adapters = state.inference.adapters
    if body.lora_name in adapters and adapters.path_of(body.lora_name) is None:
        raise _refused(f"The lora adapter '{body.lora_name}' is of --lora-adapters, and stays.")
    if not adapters.remove(body.lora_name):
        text = f"The lora adapter '{body.lora_name[:200]}' cannot be found."
        raise BodyError(404, "not_found", text, reason="unknown_adapter", param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _below_root(state: AppState, path: str) -> str:
    """The folder, from --lora-root on."""
    assert state.config.lora_root is not None
    root = Path(os.path.realpath(os.path.expanduser(state.config.lora_root)))
    try:
        folder = Path(os.path.realpath(root / path))
        if not folder.is_relative_to(root):
            raise _refused(f"'lora_path' {path[:200]} leads out of the server's folder of adapters.")
        if not folder.is_dir():
            text = f"There is no folder {path[:200]} among the server's adapters."
            raise BodyError(404, "not_found", text, reason="unknown_adapter", param="lora_path")
    except (OSError, ValueError):
        raise _refused(f"'lora_path' {path[:200]!r} is not a path.") from None
    return str(folder.relative_to(root))


def _refused(text: str) -> BodyError:
    return BodyError(400, "bad_request", text)
