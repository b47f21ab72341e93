"""A conversation of two questions; the answers are shown as they come."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="-")  # any key, unless the server has --api-key
messages = []
for question in ("My name is Clara.", "What is my name?"):
    print("You:  ", question)
    messages.append({"role": "user", "content": question})
    answer = ""
    print("Model: ", end="")
    for chunk in client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True):
        text = chunk.choices[0].delta.content or ""
        print(text, end="", flush=True)
        answer += text
    print()
    messages.append({"role": "assistant", "content": answer})
