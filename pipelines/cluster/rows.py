"""Rows of a Ray dataset answered by a bundle: an engine in every actor, as many threads as the actor has CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from castiron.pipelines.cluster.places import Place, bundle_at
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.many import Result
from castiron.pipelines.model import Asking, Model

if TYPE_CHECKING:
    import pyarrow as pa

# Columns that an answer adds: its text, why it ended, how many tokens it has, and of a row that failed the sentence.
ANSWER = ("generated", "finish_reason", "generated_tokens", "error")


class Generate:
    """What `Dataset.map_batches` runs in each of its actors:

        dataset.map_batches(
            castiron.ray.Generate, fn_constructor_args=["/models/smollm2.castiron"], fn_constructor_kwargs={"max_tokens": 64},
            batch_format="pyarrow", batch_size=64, num_cpus=2, compute=ray.data.ActorPoolStrategy(size=4),
        )

    A row has a column `prompt`, text, or `messages`, a list of role and content; the others are handed on. What comes back
    has the columns ANSWER besides. A row that cannot be answered says why in `error`, and the job goes on. Every row has
    the answer that it has alone, whatever else is in its batch and whichever actor has it.
    """

    def __init__(
        self,
        bundle: Place,
        *,
        prompt: str = "prompt",
        messages: str = "messages",
        threads: int | None = None,
        **asking: Unpack[Asking],
    ):
        """`bundle`: its path on every node, a URL of fsspec's, or what `castiron.ray.store` made. `prompt` and `messages` name
        columns. `threads` are the actor's CPUs, unless it says otherwise. `asking`: as a `Model` is asked."""
        self.prompt, self.messages, self.asking = prompt, messages, asking
        self.model = Model(bundle_at(bundle), threads or cpus_of_actor())

    def __call__(self, batch: pa.Table | Mapping[str, Any]) -> pa.Table | dict[str, Any]:
        """The rows with their answers, a table for a table (`batch_format="pyarrow"`), arrays for arrays."""
        if not (isinstance(batch, Mapping) or hasattr(batch, "column_names")):
            raise PipelineError(f"batch_format must be pyarrow or numpy; these rows are a {type(batch).__name__}")
        names = batch.keys() if isinstance(batch, Mapping) else batch.column_names
        if taken := [name for name in ANSWER if name in names]:
            raise PipelineError(f"the rows have a column {taken[0]} already, where their answers would go: rename or drop it")
        if not {self.prompt, self.messages} & set(names):
            raise PipelineError(f"the rows have neither a column {self.prompt} nor {self.messages}, but {', '.join(names)}")
        columns = {name: _values(batch, name) for name in (self.prompt, self.messages) if name in names}
        return _with_answers(batch, self.answers([self._prompt(values) for values in zip(*columns.values())]))

    def answers(self, prompts: Sequence[Any]) -> list[Result]:
        """A result for each prompt, in their order; those that begin alike are run one after another."""
        order = sorted(range(len(prompts)), key=lambda index: str(prompts[index]))
        results = self.model.generate_many([prompts[index] for index in order], **self.asking)
        return sorted((replace(result, index=order[result.index]) for result in results), key=lambda result: result.index)

    @staticmethod
    def _prompt(values: Sequence[Any]) -> Any:
        """The one that a row has of its columns; None, which is no prompt, where it has none or both."""
        given = [value for value in map(_plain, values) if value is not None]
        return given[0] if len(given) == 1 else None


def cpus_of_actor() -> int | None:
    """Whole CPUs that Ray gave to this actor, at least 1; None outside of one."""
    import ray

    if not ray.is_initialized():
        return None
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0)))


def _values(batch: pa.Table | Mapping[str, Any], name: str) -> list[Any]:
    return list(batch[name]) if isinstance(batch, Mapping) else batch.column(name).to_pylist()


def _plain(value: Any) -> Any:
    """Messages as a list of objects without the fields that only other rows of the table have."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return value


def _with_answers(batch: pa.Table | Mapping[str, Any], results: Sequence[Result]) -> pa.Table | dict[str, Any]:
    answers = {
        "generated": [result.text for result in results],
        "finish_reason": [None if result.error else result.finish_reason for result in results],
        "generated_tokens": [None if result.error else len(result.tokens) for result in results],
        "error": [result.error and str(result.error) for result in results],
    }
    if isinstance(batch, Mapping):
        import numpy as np

        return {**batch, **{name: np.array(column, object) for name, column in answers.items()}}
    import pyarrow as pa

    for name, column in answers.items():
        batch = batch.append_column(name, pa.array(column, pa.int64() if name == "generated_tokens" else pa.string()))
    return batch
