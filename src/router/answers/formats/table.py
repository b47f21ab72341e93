"""Known formats, found by signs in templates."""

from __future__ import annotations

from router.answers.formats.format import Format
from router.answers.formats.rows import (
    apertus,
    cohere,
    deepseek_dsml,
    deepseek_v3,
    deepseek_v31,
    functiongemma,
    gemma4,
    gigachat3,
    glm,
    granite3,
    harmony,
    hermes,
    hy_v3,
    internlm,
    kimi_k2,
    kimi_k3,
    listed,
    llama_json,
    minicpm5,
    minimax_m2,
    minimax_m3,
    mistral_args,
    mistral_json,
    muse_glimmer,
    phi4_mini,
    plamo3,
    pythonic,
    qwen_xml,
    solar_open2,
    step3,
    xlam,
)

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        harmony.FORMAT, muse_glimmer.FORMAT, gemma4.FORMAT, kimi_k2.FORMAT, kimi_k3.FORMAT, minimax_m3.FORMAT,
        deepseek_dsml.V4, deepseek_dsml.FORMAT, step3.FORMAT,
        deepseek_v3.FORMAT, deepseek_v31.FORMAT, plamo3.FORMAT, minimax_m2.FORMAT, listed.TOOLCALL, hy_v3.OPEN,
        hy_v3.FORMAT, listed.TOOL_CALLS, pythonic.LFM2, pythonic.OLMO3, glm.LONGCAT, glm.FORMAT, hermes.LONGCAT,
        qwen_xml.SEED, qwen_xml.FORMAT, solar_open2.FORMAT, minicpm5.FORMAT, apertus.FORMAT, gigachat3.MARK,
        gigachat3.ROLE, internlm.FORMAT, xlam.FORMAT, mistral_args.FORMAT, mistral_json.FORMAT, cohere.FORMAT,
        functiongemma.FORMAT, phi4_mini.FORMAT, granite3.FORMAT, pythonic.FORMAT, llama_json.FORMAT, hermes.FORMAT,
    )
}  # fmt: skip
"""By their names; those with the most particular signs first."""


def named(name: str, template: str = "") -> Format | None:
    """Return a format by name, of several the template's."""
    known = [row for row in FORMATS.values() if name in (row.name, *row.aliases)]
    shown = (row for row in known if row.signs(template))
    return next(shown, FORMATS.get(name) or (known[-1] if known else None))


def format_in(template: str) -> Format | None:
    """Return the template's format, as far as it shows."""
    return next((row for row in FORMATS.values() if row.signs(template)), None)
