"""instructor: typed answers by tools and by a JSON schema, repaired answers, streamed parts; and a full context."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, field_validator

ANNA = [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}]
GREEDY: Any = {"model": "tgi", "temperature": 0, "max_tokens": 60}
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    """A person"""

    name: str
    age: int


class OlderPerson(Person):
    @field_validator("age")
    @classmethod
    def _old(cls, age: int) -> int:
        if age < 100:
            raise ValueError("age is below 100")
        return age


@pytest.fixture(params=MODES, ids=[mode.name for mode in MODES])
def client(request: pytest.FixtureRequest, url: str) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0), mode=request.param)


def test_a_typed_answer(client: Any) -> None:
    answer, completion = client.create_with_completion(messages=ANNA, response_model=Person, max_retries=0, **GREEDY)
    assert answer.model_dump() == {"name": "Anna", "age": 30} and completion.usage.completion_tokens > 5


def test_parts_of_an_answer(client: Any) -> None:
    """The schema that instructor sends here is another one, and the demo model may write another name."""
    parts = list(client.create_partial(messages=ANNA, response_model=Person, **GREEDY))
    assert len(parts) > 1 and parts[0].age is None
    assert parts[-1].name and parts[-1].age == 30


def test_an_answer_is_sent_back_with_what_is_wrong(client: Any) -> None:
    """The second prompt has the answer, as a call where it was one, and the complaint."""
    with pytest.raises(InstructorRetryException, match="age is below 100") as caught:
        client.create(messages=ANNA, response_model=OlderPerson, max_retries=1, **GREEDY)
    assert caught.value.n_attempts == 2


def test_a_full_context_is_recognised(client: Any) -> None:
    messages = [{"role": "user", "content": "Hello " * 6000}]
    with pytest.raises(InstructorRetryException) as caught:
        client.create(messages=messages, response_model=Person, max_retries=0, **GREEDY)
    assert "context_length_exceeded" in str(caught.value)
