"""instructor, Anthropic's tool runner and OpenAI's streams against the gateway at argv[1]."""

import sys

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL = sys.argv[1]
MESSAGES = [{"role": "user", "content": "How is it in Rome?"}]
OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


class weather(BaseModel):  # noqa: N801 - the name of the tool
    """The weather of a city."""

    city: str


def instructor_gets_its_model() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(OPENAI, mode=mode)
        answer = client.create(model="tiny", response_model=weather, messages=MESSAGES, max_retries=0)
        assert answer.city == "Rome", (mode, answer)
    client = instructor.from_anthropic(ANTHROPIC)
    answer = client.create(model="tiny", response_model=weather, messages=MESSAGES, max_tokens=500, max_retries=0)
    assert answer.city == "Rome", answer


def the_tool_runner_runs_tools() -> None:
    cities = []

    @anthropic.beta_tool(name="weather")
    def look(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    turn = {"model": "tiny", "max_tokens": 500, "messages": MESSAGES}
    ANTHROPIC.beta.messages.tool_runner(**turn, tools=[look], max_iterations=3).until_done()
    assert set(cities) == {"Rome"}, cities
    assert len(cities) >= 2, cities


def openai_says_when_arguments_are_complete() -> None:
    with OPENAI.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[openai.pydantic_function_tool(weather)]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [weather(city="Rome")], done


instructor_gets_its_model()
the_tool_runner_runs_tools()
openai_says_when_arguments_are_complete()
