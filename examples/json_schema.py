"""An answer that fits a JSON schema, read as JSON."""

import json
import sys

from huggingface_hub import InferenceClient

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = InferenceClient(base_url=url)
answer = client.chat_completion(
    [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}],
    temperature=0,
    max_tokens=60,  # an answer that is cut is not complete JSON
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
)
person = json.loads(answer.choices[0].message.content)
print(f"{person['name']} is {person['age']} years old.")
