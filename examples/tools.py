"""The model calls a function, this program runs it, and the model puts the result into words."""

import json
import sys

from openai import OpenAI


def get_weather(location: str) -> dict[str, object]:
    """A real program would ask a weather service."""
    return {"temperature": 21, "condition": "sunny"} if location == "Paris" else {"error": "unknown place"}


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "description": "The city"}},
                "required": ["location"],
            },
        },
    }
]

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="-")  # any key, unless the server has --api-key
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
while True:
    answer = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, temperature=0)
    message = answer.choices[0].message
    if not message.tool_calls:
        print("Model:", message.content)
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = FUNCTIONS[call.function.name](**arguments)
        print("Call: ", call.function.name, arguments, "->", result)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
