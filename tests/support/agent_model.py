"""A scripted model for coding agents: it calls a tool that it is given, and is done when it reads a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.scripted_model import ScriptedModel

MAX_POSITIONS = 65_536
"""Agents begin with instructions and tools of some 27,000 of its tokens."""
COMMAND = "echo made by a tool > made.txt"
DONE = "It is done."
# Names of tools that run a command, and arguments in the order of their schemas.
_CALLS: dict[str, dict[str, Any]] = {
    "bash": {"command": COMMAND},
    "exec_command": {"cmd": COMMAND},
    "Read": {"file_path": "notes.txt"},
    "exec": {"input": f"text(await tools.exec_command({{cmd: '{COMMAND}'}}));"},
}
_CONVERSATION = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% set names = tools | map(attribute='function.name') | list if tools else [] %}"
)


def write_agent_model(path: Path) -> None:
    """Write the files; the server needs `--tool-call-parser hermes`."""
    model = ScriptedModel(path, {"<tool_call>": False, "</tool_call>": False}, max_positions=MAX_POSITIONS)
    template = _CONVERSATION + "{% if not names or messages[-1].role == 'tool' %}" + model.prompt(DONE)
    for name, arguments in _CALLS.items():
        call = json.dumps({"name": name, "arguments": arguments})
        template += f"{{% elif '{name}' in names %}}" + model.prompt(f"<tool_call>\n{call}\n</tool_call>")
    config = path / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"chat_template": template + "{% endif %}"}
    config.write_text(json.dumps(fields))
    # Codex leaves sampling open: a token in some thousand would be another one.
    generation = path / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"temperature": 0}))
