"""The models to serve: by name on the command line, or a file with options for each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config import LauncherConfig, ServeConfig
from launcher.errors import ArgumentValidation
from launcher.group_config import GroupConfig
from launcher.http_config import HttpConfig
from launcher.pool_config import PoolConfig, seconds_of
from wire.cli import config_file
from wire.cli.options import argument, option, options_of
from wire.cli.parsing import UsageError, values_of
from wire.cli.sizes import count_of
from wire.model_files import read_yaml
from wire.text.model_name import short_name

_OF_LAUNCH = frozenset({
    "config", "env", "json_output", "log_level", "more_models", "verbose", "verbose_startup",
    "graceful_termination_timeout", "shard_uds_path",
})  # fmt: skip
"""What holds for all models, beside the options of the port, of nodes and of several models."""
_OF_A_MODEL = ("model_id", "revision", "gguf_file", "lora_adapters", "served_model_name", "speculator")
_NAME = re.compile(r"[^\s/?#%](?:[^\s?#%]*[^\s/?#%])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Own:
    """Options that only a model of the file has."""

    model_id: str = argument(help="the model", has_flag=True)
    preload: bool = option(False, help="load it at the start")
    keep_alive: str | None = option(None, help="idle time")
    memory: str | None = option(None, help="GiB")
    aliases: list[str] = option([], help="more names")
    adapters: list[str] = option([], help="names of its LoRA adapters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model to serve."""

    name: str
    config: LauncherConfig
    """Of its own launch, without a port."""
    preload: bool = False
    keep_alive_s: float | None = None
    """Idle seconds until it is unloaded; None: never."""
    memory: int | None = None
    """Bytes that it counts for; None: what is estimated."""
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return what requests may call it, its own first."""
        return (self.name, *self.aliases, *self.adapters)


def read_models(config: LauncherConfig) -> list[ModelEntry]:
    """Return the models that the options name.

    Raises:
        ArgumentValidation: Names the option or the file's line, and what to give instead.
    """
    ids = [config.model_id] if config.model_id is not None else []
    if isinstance(config, ServeConfig):
        ids += config.more_models
        config = LauncherConfig(
            **{field.name: getattr(config, field.name) for field in dataclasses.fields(LauncherConfig)}
        )
    if config.models is None:
        entries = _of_command_line(config, ids)
    elif ids:
        raise ArgumentValidation(f"`--models` and the model {ids[0]} exclude each other: enter it in the file")
    else:
        entries = _of_file(config, config.models)
    seen: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if not _NAME.fullmatch(name):
                raise ArgumentValidation(f"{name!r} is no name of a model: no spaces, `?`, `#`, `%`, nor `/` at an end")
            if name in seen:
                raise ArgumentValidation(f"two models have the name {name}: give other names in a file of `--models`")
            seen[name] = entry.name
    if config.default_model is not None and config.default_model not in seen:
        raise ArgumentValidation(f"`--default-model` {config.default_model} is none of {', '.join(seen)}")
    return entries


def _of_command_line(config: LauncherConfig, ids: Sequence[str]) -> list[ModelEntry]:
    for name in _OF_A_MODEL[1:] if len(ids) > 1 else ():
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise ArgumentValidation(f"`{flag}` is of one model: enter the models in a file of `--models`")
    keep_alive = seconds_of(config.keep_alive, "--keep-alive")
    entries = []
    for model_id in ids:
        name, *aliases = config.served_model_name or [short_name(model_id)]
        if model_id != name and not model_id.startswith(("/", ".", "~")) and _NAME.fullmatch(model_id):
            aliases.append(model_id)
        one = dataclasses.replace(config, model_id=model_id)
        entries.append(_entry(one, name, keep_alive_s=keep_alive, aliases=tuple(aliases), adapters=()))
    return entries


def _of_file(config: LauncherConfig, path: Path) -> list[ModelEntry]:
    import yaml

    try:
        root = read_yaml(path, lambda text: yaml.compose(text, Loader=yaml.SafeLoader))
        parts = _members(root, path, "models", required=("models",), known=("defaults", "models"))
        defaults = _given(parts["defaults"], path) if "defaults" in parts else {}
        models = _mapping(parts["models"], path, "`models`")
        if not models:
            raise ValueError(f"{path} names no model below `models`")
        return [_of_node(config, path, name, node, defaults) for name, node in models.items()]
    except (ValueError, UsageError) as error:
        raise ArgumentValidation(f"`--models`: {error}") from None


def _of_node(
    config: LauncherConfig, path: Path, name: str, node: Any, defaults: Mapping[str, config_file.Given]
) -> ModelEntry:
    given = {**defaults, **_given(node, path)}
    if "model_id" not in given:
        raise ValueError(f"{path}: the model {name} has no `model_id`")
    own_names = {field.name for field in dataclasses.fields(_Own)}
    own = _Own(**values_of(_OWN, {key: said for key, said in given.items() if key in own_names}, path))
    values = values_of(_LAUNCH, {key: said for key, said in given.items() if key not in own_names}, path)
    aliases = (*values.pop("served_model_name", ()), *own.aliases)
    one = dataclasses.replace(config, models=None, model_id=own.model_id, **values)
    keep_alive = own.keep_alive if own.keep_alive is not None else config.keep_alive
    return _entry(
        one,
        name,
        preload=own.preload,
        keep_alive_s=seconds_of(keep_alive, f"keep_alive of {name}"),
        memory=_bytes(own.memory, name),
        aliases=tuple(dict.fromkeys(aliases)),
        adapters=tuple(own.adapters),
    )


def _entry(config: LauncherConfig, name: str, *, aliases: tuple[str, ...], **values: Any) -> ModelEntry:
    """Take from the options what is the front's, and give the model its names."""
    if config.num_replica > 1:
        raise ArgumentValidation(
            f"`--num-replica` {config.num_replica} of {name}: several models have one replica each"
        )
    log = config.request_log
    if log is not None:
        log = log.with_name(f"{log.stem}.{name.replace('/', '--')}{log.suffix}")
    batches = config.batch_dir
    if batches is not None:
        batches = batches / name.replace("/", "--")
    config = dataclasses.replace(
        config, models=None, keep_alive=None, models_memory=None, max_loaded_models=None, default_model=None,
        no_autoload=False, model_start_timeout=None, max_waiting_requests=None, uds=None, uds_mode="0600",
        ssl_certfile=None, ssl_keyfile=None, prometheus_port=None, served_model_name=[name, *aliases],
        request_log=log, batch_dir=batches,
    )  # fmt: skip
    return ModelEntry(name=name, config=config, aliases=aliases, **values)


_OWN = options_of(_Own)
_LAUNCH = options_of(LauncherConfig)
_SHARED = {
    *(field.name for kind in (HttpConfig, GroupConfig, PoolConfig) for field in dataclasses.fields(kind)), *_OF_LAUNCH
} - {"served_model_name"}  # fmt: skip


def _given(node: Any, path: Path) -> Mapping[str, config_file.Given]:
    """Read the options of a model, or of all."""
    _mapping(node, path, "a model")
    own_names = {opt.name for opt in _OWN}
    given = config_file.given_in(node, [*_OWN, *(opt for opt in _LAUNCH if opt.name not in own_names)], path)
    for name in given:
        if name in _SHARED and name not in own_names:
            raise ValueError(f"{path}, line {given[name].line}: '{name}' is of all models: give it as an option")
    return given


def _members(node: Any, path: Path, what: str, *, required: Iterable[str], known: Iterable[str]) -> Mapping[str, Any]:
    members = _mapping(node, path, f"`{what}`")
    for name in (*required, *members):
        if name not in members or name not in known:
            raise ValueError(f"{path} takes `models:` with a model in each line, and `defaults:`; not `{name}`")
    return members


def _mapping(node: Any, path: Path, what: str) -> Mapping[str, Any]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path}: {what} takes lines such as `chat: {{model_id: demo}}`")
    members: dict[str, Any] = {}
    for key, value in node.value:
        name = str(key.value)
        if name in members:
            raise ValueError(f"{path}, line {key.start_mark.line + 1}: '{name}' is given again")
        members[name] = value
    return members


def _bytes(text: str | None, name: str) -> int | None:
    """Read a `memory`: GiB, or a number with a unit."""
    if text is None:
        return None
    try:
        size = int(float(text) * 2**30) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) else count_of(text, "bytes")
    except ValueError as error:
        raise ValueError(f"`memory` of {name}: {text} is no size: {error}") from None
    if size <= 0:
        raise ValueError(f"`memory` of {name} must be > 0")
    return size
