"""A published model, all-MiniLM-L6-v2, gives the embeddings that sentence-transformers gives."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest
from support.published_models import MINILM, fetched
from support.running_server import running_server

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

TEXTS = ("The cat sits on the mat.", "A feline rests on a rug.", "Stocks fell by 3 %.", "naïve café 北京", "x")
# Of more tokens than the model's limit of 256, which cuts it.
LONG = "The quick brown fox jumps over the lazy dog. " * 40


def test_embeddings() -> None:
    import sentence_transformers

    folder = fetched(MINILM)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    wanted = model.encode([*TEXTS, LONG])
    with running_server(folder, "--dtype", "float32") as server:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": [*TEXTS, LONG], "truncate": True}, timeout=120)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            named = client.embeddings.create(model="any", input=list(TEXTS)).data
    found = np.array(answer.raise_for_status().json())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose([one.embedding for one in named], found[:-1], rtol=0, atol=1e-7)
    like = found[0] @ found[1:3].T
    assert like[0] > 0.4 > 0.2 > like[1]
