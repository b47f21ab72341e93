"""Many requests at once. The server answers 429 beyond --max-concurrent-requests; the client waits and tries again."""

import asyncio
import sys

from openai import AsyncOpenAI

QUESTIONS = [f"What is {first} plus {second}?" for first in range(2, 6) for second in range(2, 6)]


async def main(url: str) -> None:
    # The client reads Retry-After, and tries a request that was refused up to max_retries times again.
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=10)

    async def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(model="demo", messages=messages, temperature=0)
        return answer.choices[0].message.content

    # All of them at once: the server puts them into one batch.
    answers = await asyncio.gather(*map(ask, QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(question, answer)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"))
