"""Known formats, found by signs in templates."""

from __future__ import annotations

from router.openai.formats.format import Format
from router.openai.formats.rows.json import cohere, granite3, hermes, listed, llama_json, mistral_json, phi4_mini
from router.openai.formats.rows.named import deepseek_v3, deepseek_v31, harmony, kimi_k2, mistral_args
from router.openai.formats.rows.syntax import functiongemma, gemma4, pythonic
from router.openai.formats.rows.tagged import deepseek_dsml, glm, minimax_m2, qwen_xml

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        harmony.FORMAT, gemma4.FORMAT, kimi_k2.FORMAT, deepseek_dsml.V4, deepseek_dsml.FORMAT, deepseek_v3.FORMAT,
        deepseek_v31.FORMAT, minimax_m2.FORMAT, listed.TOOLCALL, listed.TOOL_CALLS, pythonic.LFM2, glm.FORMAT,
        qwen_xml.SEED, qwen_xml.FORMAT, mistral_args.FORMAT, mistral_json.FORMAT, cohere.FORMAT,
        functiongemma.FORMAT, phi4_mini.FORMAT, granite3.FORMAT, pythonic.FORMAT, llama_json.FORMAT, hermes.FORMAT,
    )
}  # fmt: skip
"""By their names; those with the most particular signs first."""


def named(name: str, template: str = "") -> Format | None:
    """Return a format by name, of several the template's."""
    known = [row for row in FORMATS.values() if name in row.aliases]
    shown = (row for row in known if row.signs(template))
    return FORMATS.get(name) or next(shown, known[-1] if known else None)


def format_in(template: str) -> Format | None:
    """Return the template's format, as far as it shows."""
    return next((row for row in FORMATS.values() if row.signs(template)), None)
