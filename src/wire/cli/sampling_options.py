"""SamplingOptions: options of the launcher and of the router for what requests leave open about sampling."""

from __future__ import annotations

from dataclasses import dataclass

from wire.cli.options import option
from wire.text.sampling_defaults import AUTO, sampling_defaults

_MODEL = "Model"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for OpenAI's and Anthropic's routes; TGI's have defaults of their own."""

    generation_config: str | None = option(
        None, panel=_MODEL, metavar="auto|none|FOLDER",
        help="Whose generation_config.json has the sampling parameters that a request to OpenAI's and Anthropic's "
        "routes leaves out: the model's (`auto`), none, or that of a folder. Default: auto.",
    )  # fmt: skip
    override_generation_config: str | None = option(
        None, panel=_MODEL, help='JSON: values that win over those of --generation-config, as {"temperature": 0.6}.'
    )


def check_sampling(options: SamplingOptions, error: type[Exception]) -> None:
    """Refuses what is wrong whatever the model, before it is loaded. Raises `error`."""
    sampling_defaults(options.generation_config or AUTO, options.override_generation_config, None, error)
