"""The tokens of a GGUF file: their roles, those that end an answer, and their flags.

A file often names only one end token. As in llama.cpp (llama-vocab.cpp), other tokens are
recognised by their texts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf.metadata import Metadata

PREFIX = "tokenizer.ggml."
# llama.cpp's llama_token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

# llama.cpp's ids for roles that a file does not name, by tokenizer.ggml.model.
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
# Values of tokenizer.ggml.pre without a default BOS.
_NO_DEFAULT_BOS = ("chatglm-bpe", "glm4", "glm5")
# By role: the name in chat templates.
TEMPLATE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")

# Texts of tokens that end an answer.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# (text, sets): the token with this text ends no answer if each set has the text of another end token.
_EXCEPTIONS = (
    ("<|end|>", ({"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"})),
    ("</s>", ({"<|tool_response>", "<|plamo:eos|>"},)),
)

# Roles of fill-in-the-middle (FIM) tokens, whose keys are fim_pre_token_id and so on, and older keys.
_FIM = {"pre": "prefix", "suf": "suffix", "mid": "middle", "pad": "fim_pad", "rep": "fim_rep", "sep": "fim_sep"}
# If a file does not name the token of a role, it is the one with the first of these texts.
_FIM_TEXTS = {
    "pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}  # fmt: skip
# Texts of gpt-oss that are never split.
_HARMONY_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")
_TEXTS = {*_END_TEXTS, *_HARMONY_TEXTS, *(text for texts in _FIM_TEXTS.values() for text in texts)}
# FIM tokens that end an answer.
_END_FIM = ("pad", "rep", "sep")

# Special tokens of Phi-3 that don't include the white space after them.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
# Values of tokenizer.ggml.pre of models whose mask token includes the white space before it.
_JINA_V2 = ("jina-v2-de", "jina-v2-es", "jina-v2-code")


class Vocabulary(Metadata):
    """The metadata of a tokenizer.

    model: the kind of tokenizer, such as "gpt2"; None if the file has none. tokens: texts by id.
    """

    def __init__(self, file: GgufFile):
        super().__init__(file, PREFIX)
        model = self.string("model")
        self.model = None if model in ("no_vocab", "none") else model
        self.tokens: list[str] = [] if self.model is None else self.strings("tokens")

    def strings(self, key: str) -> list[str]:
        """Return the list of strings under a key; CheckpointError if it is missing or empty."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            problem = "missing" if value is None else "empty" if isinstance(value, list) else "not a list of strings"
            raise self.error(f"{PREFIX}{key} is {problem}")
        return value

    def numbers(self, key: str) -> np.ndarray | None:
        """Return the array under a key, with a number for each token; None if it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.inconsistent(f"{PREFIX}{key} is not a list of {len(self.tokens)} numbers, one for each token")
        return value

    def types(self) -> list[int]:
        types = self.numbers("token_type")
        return [NORMAL] * len(self.tokens) if types is None else types.tolist()

    def token(self, role: str) -> str | None:
        """Return the text of the token with a role, such as "bos"."""
        number = self.role_ids().get(role)
        if number is not None and number >= len(self.tokens):
            raise self.invalid(f"{role}_token_id", f"below {len(self.tokens)}, the number of tokens")
        return None if number is None else self.tokens[number]

    def role_ids(self) -> dict[str, int]:
        """Return ids by role, such as "bos"."""
        stated = {role: self.integer(f"{role}_token_id") for role in _ROLES}
        named = {role: number for role, number in stated.items() if number is not None}
        defaults = _DEFAULT_IDS.get(self.model or "", {})
        if self.model != "llama":
            # llama.cpp takes token 11 even if it is a comma, as in GPT-2's vocabulary, which would end every answer.
            types, has_none = self.types(), self.get("pre") in _NO_DEFAULT_BOS
            is_special = lambda number: number < len(types) and types[number] in (UNKNOWN, CONTROL)
            defaults = {role: n for role, n in defaults.items() if is_special(n) and not (role == "bos" and has_none)}
        return defaults | named


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Return the texts of special tokens for the chat template, by names such as "bos_token"."""
    vocabulary = Vocabulary(file)
    ids, tokens = vocabulary.role_ids(), vocabulary.tokens
    return {name: tokens[ids[role]] for role, name in TEMPLATE_NAMES.items() if ids.get(role, len(tokens)) < len(tokens)}


def _known_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: number for number, text in enumerate(vocabulary.tokens) if text in _TEXTS}


def fim_token_ids(file: GgufFile) -> dict[str, int]:
    """Return the fill-in-the-middle tokens that the file names, by role, such as "suf"."""
    metadata = Metadata(file, PREFIX)
    by_role = {role: [metadata.integer(f"{key}_token_id") for key in (f"fim_{role}", old)] for role, old in _FIM.items()}
    return {role: number for role, numbers in by_role.items() for number in reversed(numbers) if number is not None}


def _all_fim_ids(vocabulary: Vocabulary, known_ids: Mapping[str, int]) -> dict[str, int]:
    by_text = {role: next((known_ids[text] for text in texts if text in known_ids), None) for role, texts in _FIM_TEXTS.items()}
    return {role: number for role, number in by_text.items() if number is not None} | fim_token_ids(vocabulary.file)


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the ids that end an answer, as llama_vocab_is_eog; those that the file names first."""
    vocabulary = Vocabulary(file)
    roles, known_ids = vocabulary.role_ids(), _known_ids(vocabulary)
    fim = _all_fim_ids(vocabulary, known_ids)
    by_text = {known_ids[text] for text in _END_TEXTS if text in known_ids}
    by_text |= {fim[role] for role in _END_FIM if fim.get(role, len(vocabulary.tokens)) < len(vocabulary.tokens)}
    ids = dict.fromkeys([*(roles[role] for role in ("eos", "eot", "eom") if role in roles), *sorted(by_text)])
    texts = {vocabulary.tokens[number] for number in ids if number < len(vocabulary.tokens)}
    for text, sets in _EXCEPTIONS:
        if text in texts and all(texts & others for others in sets):
            ids.pop(known_ids[text])
    return tuple(ids)


def added_tokens(vocabulary: Vocabulary, merges: Iterable[Sequence[str]]) -> Iterator[dict]:
    """Yield added_tokens; one that `merges` produce is not special for its text alone."""
    roles, known_ids = set(vocabulary.role_ids().values()), _known_ids(vocabulary)
    by_text = {*eos_token_ids(vocabulary.file), *_all_fim_ids(vocabulary, known_ids).values()}
    merged = {text for left, right in merges if (text := left + right) in known_ids}
    side, is_stripped = _stripping(vocabulary)
    for number, (content, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types())):
        is_named = number in roles and (kind != NORMAL or len(content) > 1)
        is_recognised = number in by_text and kind != USER_DEFINED and content not in merged
        special = kind in (UNKNOWN, CONTROL) or is_named or is_recognised
        if content and (special or kind == USER_DEFINED or content in _HARMONY_TEXTS):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            flags[side] = is_stripped(content)
            yield {"id": number, "content": content, **flags, "special": special}


def _stripping(vocabulary: Vocabulary) -> tuple[str, Callable[[str], bool]]:
    """Return the side on which tokens include white space, and which tokens do."""
    value = lambda key: str(vocabulary.file.metadata.get(key, ""))
    name = value("general.name").lower()
    if value(PREFIX + "pre") in _JINA_V2:
        return "lstrip", lambda text: text == "<mask>"
    # llama.cpp looks at the name only, which for newer files is "Phi 3".
    if "phi-3" in name or "phi3" in name or (value("general.architecture") == "phi3" and vocabulary.model == "llama"):
        return "rstrip", lambda text: text not in _PHI3_PLAIN
    return "lstrip", lambda text: text == "[MASK]" and "modern-bert" in name
