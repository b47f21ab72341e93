"""`model-server quantize demo`: in 4 bits the demo model is nearly as sure of its own samples, and still gives nine of
ten documented answers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.running_server import running_server

from demo_model import check

pytestmark = [pytest.mark.long, pytest.mark.e2e]


def test_the_documented_answers_survive(tmp_path: Path) -> None:
    output = tmp_path / "quantized"
    command = [sys.executable, "-m", "model_server", "quantize", "demo", str(output), "--num-samples", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    before, after = map(float, re.findall(r"Perplexity on .*: ([\d.]+) before, ([\d.]+) after", said)[0])
    assert before > 1 and after <= 1.05 * before
    demo = check.Demo()
    listed = check.prompts("documented")
    right = 0
    with running_server(output) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert "Weights: gptq, 4 bits, groups of 128" in server.log()
        for prompt in listed:
            body = {"prompt": demo.encoded(prompt), "max_tokens": prompt.max_new_tokens, "temperature": 0}
            answer = client.post("/v1/completions", json=body | {"add_special_tokens": False})
            assert answer.status_code == 200, answer.text
            right += prompt.fits(answer.json()["choices"][0]["text"])
    assert right >= 0.9 * len(listed), f"{right} of {len(listed)}"
