"""pydantic-ai against the gateway at argv[1]: its models for both of OpenAI's endpoints and for Anthropic's."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, QUESTION = sys.argv[1], "How is it in Rome?"


class weather(BaseModel):  # noqa: N801 - the name of the tool
    """The weather of a city."""

    city: str


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(base_url=URL, api_key="none")
for model in (
    OpenAIChatModel("tiny", provider=openai),
    OpenAIResponsesModel("tiny", provider=openai),
    AnthropicModel("tiny", provider=anthropic),
):
    for strict in (None, True):
        agent = Agent(model, output_type=ToolOutput(weather, name="weather", strict=strict), retries=0)
        assert agent.run_sync(QUESTION).output == weather(city="Rome"), model
