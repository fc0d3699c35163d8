"""Answers whose beginning the client has written, and prompts that end with a message."""

from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.world import MODEL, QUESTION, WEATHER, World

BEGINNING: dict[str, Any] = {"role": "assistant", "content": "It is"}
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
FAMILIES = ("deepseek", "glm")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_goes_on_with_its_last_message_if_asked(family: str, request: pytest.FixtureRequest) -> None:
    service: World = request.getfixturevalue(family)
    service.says(" sunny.")
    for fields in (CONTINUE, {"continue_final_message": True}, {**CONTINUE, "reasoning_effort": "high"}):
        (choice,) = service.chat(QUESTION, BEGINNING, extra_body=fields).choices
        assert service.prompt.endswith("It is")
        assert (choice.message.content, "reasoning" in choice.message.model_dump()) == (" sunny.", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_goes_on_with_the_assistant_s_turn(family: str, request: pytest.FixtureRequest) -> None:
    service: World = request.getfixturevalue(family)
    service.says(" sunny.")
    for content in ("It is", [{"type": "text", "text": "It is"}]):
        turns: Any = [QUESTION, {"role": "assistant", "content": content}]
        answer = service.anthropic.messages.create(model=MODEL, messages=turns, max_tokens=100)
        assert service.prompt.endswith("It is")
        assert [block.text for block in answer.content if block.type == "text"] == [" sunny."]
        counted = service.anthropic.messages.count_tokens(model=MODEL, messages=turns)
        assert counted.input_tokens == len(service.decode.generated[-1].prompt_ids)


def test_what_no_answer_can_go_on_with_is_refused(deepseek: World) -> None:
    for last in (QUESTION, {**BEGINNING, "tool_calls": [CALL]}):
        with pytest.raises(
            openai.BadRequestError, match="messages: expected an assistant's message without tool calls"
        ):
            deepseek.chat(QUESTION, last, extra_body=CONTINUE)
    use: Any = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    turns: Any = [QUESTION, {"role": "assistant", "content": [use]}]
    with pytest.raises(anthropic.BadRequestError, match="without tool calls"):
        deepseek.anthropic.messages.create(model=MODEL, messages=turns, max_tokens=100)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_end_as_asked(family: str, request: pytest.FixtureRequest) -> None:
    service: World = request.getfixturevalue(family)

    def prompt(*messages: dict[str, Any], **fields: Any) -> str:
        answer = service.http.post("/tokenize", json={"messages": messages, **fields}).json()
        return bytes(answer["tokens"]).decode()

    whole = prompt(QUESTION, tools=[WEATHER])
    closed = prompt(QUESTION, tools=[WEATHER], add_generation_prompt=False)
    assert whole.startswith(closed)
    assert closed.endswith("Rome?")
    answered = prompt(QUESTION, BEGINNING, add_generation_prompt=False)
    assert answered.startswith(prompt(QUESTION, BEGINNING, **CONTINUE))
    assert prompt(QUESTION, BEGINNING, **CONTINUE).endswith("It is")
    service.says("hi")
    service.chat(QUESTION, extra_body={"add_generation_prompt": False})
    assert service.prompt == closed
