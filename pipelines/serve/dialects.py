"""The routes of the other APIs in which a chat may be asked for: OpenAI's responses and Anthropic's messages."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from castiron.pipelines.serve import messages_request, responses_request
from castiron.pipelines.serve.answers import answered, awaited
from castiron.pipelines.serve.content import named
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.messages_reply import MessagesReply
from castiron.pipelines.serve.responses_reply import ResponsesReply
from castiron.pipelines.serve.responses_store import ResponseStore
from castiron.pipelines.serve.text_api import TextApi

# Reads the body of a request as one of a kind.
Take = Callable[[Request, type], Awaitable[Any]]
# What keeps responses, and the owner of those that a client may see.
Keeper = tuple[ResponseStore, bytes]


async def response(api: TextApi, body: responses_request.ResponsesRequest, keeper: Keeper | None = None) -> Any:
    """Starts the answer to a request for a response; None keeps none and knows of none before."""

    def keep(response: dict) -> None:
        store, owner = keeper
        store.put(owner, response, [*conversation, *responses_request.messages_of(response["output"], "output")])

    def reply() -> ResponsesReply:
        keeping = None if keeper is None or body.store is False else keep
        return ResponsesReply(api.names[0], api.token_bytes, body, api.sampling_of(asked), keeping)

    with named(responses_request.FIELDS):
        asked, conversation = _asked(body, keeper)
        return await api.chat(asked, reply, bound=True)


async def message(api: TextApi, body: messages_request.MessagesRequest) -> Any:
    """Starts the answer to a request for a message."""
    asked = messages_request.chat_request(body, api.variables)
    thoughts = not (body.thinking and body.thinking.display == "omitted")
    reply = lambda: MessagesReply(api.names[0], api.token_bytes, thoughts)
    with named(messages_request.FIELDS):
        return await api.chat(asked, reply, bound=True, go_on=messages_request.goes_on(body))


def routes(api: TextApi, take: Take) -> list[Route]:
    """Those of a model."""

    async def respond(request: Request) -> Response:
        body = await take(request, responses_request.ResponsesRequest)
        return await answered(request, api, body, response(api, body, _store(request)))

    async def count_input(request: Request) -> Response:
        body = await take(request, responses_request.InputTokensRequest)
        with named(responses_request.FIELDS):
            asked, _ = _asked(body, _store(request))
            count = await awaited(request, api, api.count(asked))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def send_message(request: Request) -> Response:
        body = await take(request, messages_request.MessagesRequest)
        return await answered(request, api, body, message(api, body))

    async def count_tokens(request: Request) -> Response:
        body = await take(request, messages_request.CountTokensRequest)
        asked = messages_request.chat_request(body, api.variables)
        with named(messages_request.FIELDS):
            count = await awaited(request, api, api.count(asked, go_on=messages_request.goes_on(body)))
        return JSONResponse({"input_tokens": count})

    posted = {
        "/v1/responses": respond, "/v1/responses/input_tokens": count_input,
        "/v1/messages": send_message, "/v1/messages/count_tokens": count_tokens,
    }  # fmt: skip
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()] + stored_routes()


def stored_routes() -> list[Route]:
    """Those of what a server keeps, whichever model it came from."""

    async def stored(request: Request) -> Response:
        store, owner = _store(request)
        name = request.path_params["name"]
        if request.method == "DELETE":
            store.delete(owner, name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "a response that is whole is not streamed again; leave stream out", "stream", "invalid_value")
        return Response(store.need(owner, name).body, media_type="application/json")

    return [Route("/v1/responses/{name}", stored, methods=["GET", "DELETE"])]


def _store(request: Request) -> Keeper:
    return request.state.responses, request.state.client


def _asked(body: responses_request.PromptOfResponse, keeper: Keeper | None):
    """The chat that a request for a response asks for, and the messages of its conversation."""
    before, (store, owner) = [], keeper or (None, b"")
    if (name := body.previous_response_id) is not None:
        if (found := store.get(owner, name) if store else None) is None:
            message = f"there is no response {name!r:.80} on this server (any more); send the whole conversation"
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
        before = list(found.messages)
    messages = responses_request.messages_of(body.items(lambda name: store.item(owner, name) if store else None))
    return responses_request.chat_request(body, before, messages), [*before, *messages]
