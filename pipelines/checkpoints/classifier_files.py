"""How a directory's model judges two texts together: HF's sequence classifiers with one label, which rerank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from castiron.emitter.pooling import Dense, Pooling
from castiron.emitter.shown import shown, shown_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Encoding, Tensor
from castiron.pipelines.checkpoints.sentence_files import tokenizer_limit

KIND = "ForSequenceClassification"


@dataclass(frozen=True)
class Head:
    """What a family's classifiers have after the states. tensors: name in the file -> that of the pooling's layer. pooling:
    from the config. types: whether the second text's tokens are of another type."""

    tensors: Mapping[str, str]
    pooling: Callable[[dict], Pooling]
    types: bool = False


def _bert(config: dict) -> Pooling:
    return Pooling("cls", (Dense("pooler", config["hidden_size"], True, "tanh"), Dense("classifier", 1, True)), False)


def _modernbert(config: dict) -> Pooling:
    biased, norm = config.get("classifier_bias") is True, (config.get("norm_eps", 1e-5), config.get("norm_bias") is True)
    activation = config.get("classifier_activation", "gelu")
    head = Dense("head", config["hidden_size"], biased, activation, norm)
    return Pooling(config.get("classifier_pooling", "cls"), (head, Dense("classifier", 1, True)), False)


_CLASSIFIER = {f"classifier.{part}": f"classifier.linear.{part}" for part in ("weight", "bias")}
# By model type.
HEADS = {
    "bert": Head(
        {f"bert.pooler.dense.{part}": f"pooler.linear.{part}" for part in ("weight", "bias")} | _CLASSIFIER, _bert, True
    ),
    "modernbert": Head(
        {f"head.dense.{part}": f"head.linear.{part}" for part in ("weight", "bias")}
        | {f"head.norm.{part}": f"head.norm.{part}" for part in ("weight", "bias")} | _CLASSIFIER,
        _modernbert,
    ),
}  # fmt: skip


def read_classifier(path: Path, config: dict, stored: Mapping[str, Tensor]) -> Encoding | None:
    """What the config and the tensors of the directory `path` say, None for a model that is none of these; CheckpointError, one
    sentence, for what castiron does not do."""
    kinds = config.get("architectures")
    if not (isinstance(kinds, list) and kinds and isinstance(kinds[0], str) and kinds[0].endswith(KIND)):
        return None
    head, weight = HEADS.get(config["model_type"]), stored.get("classifier.weight")
    if head is None or weight is None or weight.shape[:1] != (1,):
        kind = shown_text(kinds[0])
        raise CheckpointError(
            f"{path} holds a {kind}: castiron takes such models of {', '.join(HEADS)}, with one label, to rerank texts"
        )
    if not isinstance(config.get("hidden_size"), int):
        raise CheckpointError(
            f"{path} gives hidden_size as {shown(config.get('hidden_size'))}, not as a number: fetch it again"
        )
    pooling = head.pooling(config)
    if pooling.mode not in ("cls", "mean") or any(dense.activation not in _ACTIVATIONS for dense in pooling.dense):
        raise CheckpointError(f"{path} pools or activates what its classifier gets in a way that castiron does not know")
    tensors = {name: replace(stored[own], name=name) for own, name in head.tensors.items() if own in stored}
    return Encoding(pooling, max_tokens=tokenizer_limit(path), tensors=tensors, relevance=_relevance(config), types=head.types)


_ACTIVATIONS = ("identity", "tanh", "gelu", "relu", "silu")


def _relevance(config: dict) -> str:
    """What sentence-transformers' CrossEncoder makes of the number: what the config names, else a sigmoid."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if named not in ("Sigmoid", "Identity"):
        raise CheckpointError(
            f"the config has {shown_text(named)} after its classifier, and castiron knows Sigmoid and Identity"
        )
    return named.lower()
