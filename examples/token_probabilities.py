"""How sure the model was of each token, and what else was likely: TGI's API, without any library."""

import json
import math
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
body = {
    "inputs": "The capital of France is",
    "parameters": {"max_new_tokens": 4, "details": True, "top_n_tokens": 3},
}
request = urllib.request.Request(
    f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
)
with urllib.request.urlopen(request) as response:
    details = json.load(response)["details"]
for token, likely in zip(details["tokens"], details["top_tokens"], strict=True):
    others = ", ".join(f"{other['text']!r} {math.exp(other['logprob']):.0%}" for other in likely)
    print(f"{token['text']!r:12} {math.exp(token['logprob']):4.0%}   of {others}")
