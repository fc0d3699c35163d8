"""Answers of /v1/responses/compact: an item with the summary."""

import time
import uuid
from typing import Literal

from typing_extensions import TypedDict

from gateway.answers.blocks import BlockAnswer
from gateway.answers.responses import ResponseUsage, usage_of
from gateway.errors import ApiError
from gateway.requests.response_input import encoded_summary


class CompactionItem(TypedDict):
    """What stands for the conversation in later requests. encrypted_content: the summary, encoded, not encrypted."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


class CompactedResponse(TypedDict):
    """A compacted conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage


class CompactionAnswer(BlockAnswer):
    """The text of the answer is the summary. Its reasoning is dropped."""

    def whole(self) -> CompactedResponse:
        summary = "".join(block.text for block in self._blocks if block.kind == "text")
        if not summary:
            raise ApiError(400, f"the model wrote no summary in {self._output_tokens} tokens", code="no_summary")
        content = encoded_summary(summary)
        return {
            "id": self.prepared.request_id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [{"id": f"cmp_{uuid.uuid4().hex}", "type": "compaction", "encrypted_content": content}],
            "usage": usage_of(self.prepared, self._output_tokens, self._reasoning_tokens),
        }
