"""The functions of a request to OpenAI's /v1/responses, by themselves and in namespaces, and which of them it wants called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from castiron.pipelines.serve.content import Kind, OneOf, one_of, parsed
from castiron.pipelines.serve.schemas import (
    DirectCallers,
    Function,
    FunctionIdentifier,
    FunctionName,
    NamedTool,
    Objects,
    Tool,
)


class FunctionTool(Kind):
    type: Literal["function"]
    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: DirectCallers | None = None


class Namespace(Kind):
    """Functions that go by its name and theirs."""

    type: Literal["namespace"]
    name: FunctionIdentifier
    description: str | None = None
    tools: Annotated[list[Annotated[dict[str, Any], OneOf(FunctionTool)]], Field(fail_fast=True)]


AnyTool = Annotated[dict[str, Any], OneOf(FunctionTool, Namespace)]


class AllowedTools(Kind):
    """Those of the tools that may be called now."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Objects


class ChosenFunction(Kind):
    type: Literal["function"]
    name: str
    namespace: str | None = None


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function of a namespace."""
    return f"{namespace}.{name}" if namespace else name


def names_of(tools: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Name and namespace of each function that is in one, by its full name; of tools that are sound."""
    spaces = [tool for tool in tools if tool.get("type") == "namespace"]
    return {
        full_name(space["name"], each["name"]): {"name": each["name"], "namespace": space["name"]}
        for space in spaces
        for each in space["tools"]
    }


def functions(tools: Iterable[dict[str, Any]]) -> list[Function]:
    """All of them, by their full names; ApiError for tools that a server would have to run itself, and for names that are too
    long together."""
    found: list[Function] = []

    def add(one: FunctionTool, here: str, space: Namespace | None = None, about: str | None = None) -> None:
        described = " ".join(filter(None, [about, one.description])) or None
        named = {"name": full_name(space and space.name, one.name), "description": described}
        found.append(parsed(Function, named | {"parameters": one.parameters, "strict": one.strict}, here))

    for index, tool in enumerate(tools):
        here = f"tools.{index}"
        one = one_of({"function": FunctionTool, "namespace": Namespace}, tool, here)
        if isinstance(one, FunctionTool):
            add(one, here)
            continue
        for place, each in enumerate(one.tools):
            inner = f"{here}.tools.{place}"
            # The first says what all of them are about.
            add(one_of({"function": FunctionTool}, each, inner), inner, one, None if place else one.description)
    return found


def chosen_tools(tools: Sequence[dict[str, Any]], choice: str | dict[str, Any] | None) -> dict[str, Any]:
    """tools and tool_choice of a chat."""
    given, chosen = functions(tools), choice if isinstance(choice, str) else None
    named: NamedTool | None = None
    if isinstance(choice, dict):
        one = one_of({"function": ChosenFunction, "allowed_tools": AllowedTools}, choice, "tool_choice")
        if isinstance(one, AllowedTools):
            allowed = [parsed(ChosenFunction, tool, f"tool_choice.tools.{index}") for index, tool in enumerate(one.tools)]
            names = {full_name(each.namespace, each.name) for each in allowed}
            given, chosen = [each for each in given if each.name in names], one.mode
        else:
            named = NamedTool(type="function", function=FunctionName(name=full_name(one.namespace, one.name)))
    return {"tools": [Tool(type="function", function=each) for each in given] or None, "tool_choice": named or chosen}
