"""HttpConfig: the options of the port where clients are served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from launcher.errors import ArgumentValidation
from wire import tls
from wire.cli.options import option
from wire.cli.root_path_options import RootPathOptions, check_root_path
from wire.cli.uds_options import UdsOptions, check_uds
from wire.keys import SCHEDULING_POLICY, SchedulingPolicy, check_keys

_HTTP = "HTTP"
_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class HttpConfig(UdsOptions, RootPathOptions):
    """Options of the router's HTTP port."""

    handed_on: ClassVar = frozenset({
        "AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE", "BODY_TIMEOUT_SECONDS", "CHAT_TEMPLATE", "HEAD_TIMEOUT_SECONDS",
        "KEEP_ALIVE_SECONDS", "KSERVE_API", "MAX_CONNECTIONS", "MAX_REQUEST_SECONDS", "MAX_STEP_SECONDS",
        "MAX_STOP_SEQUENCE_BYTES", "MAX_UNREAD_BYTES", "MIN_BATCH_PREFILL_TOKENS", "PREFILL_CHUNKING",
        "PREFIX_CACHING", "STALLED_CLIENT_SECONDS", "TGI_DIST_TIMEOUT",
    })  # fmt: skip
    """Variables of router and shards for which the launcher has no option."""

    hostname: str = option("0.0.0.0", panel=_HTTP, help="Address to listen on.")
    port: int = option(3000, short="p", panel=_HTTP, maximum=_PORT, help="Port to listen on; 0 chooses a free one.")
    aip_http_port: int | None = option(
        None, panel=_HTTP, maximum=_PORT, help="Vertex AI's name for `--port`, which it overrides."
    )
    prometheus_port: int | None = option(
        None, panel=_HTTP, maximum=_PORT, help="A separate port for /metrics; opened only if given, 0 for none."
    )
    api_key: str | None = option(None, panel=_HTTP, header=True, help="Bearer token that clients must send.")
    keys_file: Path | None = option(
        None, panel=_HTTP,
        help="YAML file of API keys with their scopes, limits and shares, instead of --api-key; it may change while "
        "the server runs. `launcher keys new NAME` makes a row.",
    )  # fmt: skip
    scheduling_policy: SchedulingPolicy | None = option(None, panel=_HTTP, help=SCHEDULING_POLICY)
    cors_allow_origin: list[str] = option(
        [], panel=_HTTP, header=True, help="An allowed origin; repeatable. Default: any."
    )
    no_playground: bool = option(
        False, panel=_HTTP, help="Answer browsers at / as any other client, without the page to try the model."
    )
    error_format: Literal["auto", "tgi"] = option(
        "auto", panel=_HTTP, help="Form of errors on OpenAI's routes: OpenAI's with `auto`, or TGI's."
    )
    compute_type: str | None = option(
        None, panel=_HTTP, header=True, help="Value of the response header x-compute-type. Default: from the GPUs."
    )
    served_model_name: list[str] = option(
        [], panel=_HTTP,
        help="A name of the model in OpenAI's API; repeatable, the first is used in answers. Default: the model's id.",
    )  # fmt: skip
    ssl_certfile: Path | None = option(
        None, panel=_HTTP, help="PEM file with a certificate (and its chain): the port then speaks HTTPS."
    )
    ssl_keyfile: Path | None = option(
        None, panel=_HTTP, help="PEM file with the certificate's key. Default: the key in --ssl-certfile."
    )


def http_port(config: HttpConfig) -> tuple[str, int]:
    """The flag that names the HTTP port, and the port that was asked for."""
    return ("--port", config.port) if config.aip_http_port is None else ("--aip-http-port", config.aip_http_port)


def check_http(config: HttpConfig) -> None:
    """Refuses what is wrong whatever the machine. Raises ArgumentValidation."""
    if config.api_key == "":  # not what an empty variable comes to, which counts as not set
        raise ArgumentValidation("`--api-key` is empty: give a key, or leave the flag out to serve every client")
    check_keys(config.keys_file, config.api_key, ArgumentValidation)
    flag, port = http_port(config)
    if config.prometheus_port is not None and config.prometheus_port == port != 0:
        raise ArgumentValidation(f"`{flag}` and `--prometheus-port` are both {port}")
    check_uds(config, config.ssl_certfile, ArgumentValidation)
    check_root_path(config, ArgumentValidation)
    if "" in config.served_model_name:
        raise ArgumentValidation("`--served-model-name` is empty")
    try:
        tls.check(config.ssl_certfile, config.ssl_keyfile)
    except tls.TlsError as error:
        raise ArgumentValidation(str(error)) from None
