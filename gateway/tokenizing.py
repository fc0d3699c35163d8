"""Text to tokens and back, for clients: nothing is generated."""

from starlette.responses import JSONResponse, Response

from gateway.completer import Completer
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.messages import CountTokensRequest
from gateway.requests.tokens import DetokenizeRequest, TokenizeRequest
from gateway.tokenizer import CheckpointTokenizer


class Tokenizing:
    """Answers requests that are about tokens. For threads: a long text takes long."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer

    @property
    def _tokenizer(self) -> CheckpointTokenizer:
        return self._completer.tokenizer

    def count(self, request: CountTokensRequest) -> Response:
        """How long the prompt of a conversation is. Raises ApiError."""
        with request.renaming():
            token_ids, _ = self._completer.preparer.chat_prompt(self._completer.chat_of(request))
        return JSONResponse({"input_tokens": len(token_ids)})

    def tokenize(self, request: TokenizeRequest) -> Response:
        """The tokens of a text or of a conversation. Raises ApiError."""
        if request.prompt is not None:
            token_ids = self._tokenizer.encode(request.prompt, special_tokens=request.add_special_tokens is not False)
        else:
            chat = ChatCompletionRequest.model_construct(
                messages=request.messages, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs
            )
            token_ids, _ = self._completer.preparer.chat_prompt(chat, special_tokens=request.add_special_tokens is True)
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": self._completer.context_length,
                "tokens": token_ids,
                "token_strs": self._tokenizer.spelled(token_ids) if request.return_token_strs else None,
            }
        )

    def detokenize(self, request: DetokenizeRequest) -> Response:
        """The text of tokens, special ones included. Raises ApiError."""
        self._tokenizer.check_ids(request.tokens, "tokens")
        return JSONResponse({"prompt": self._tokenizer.decode(request.tokens)})
