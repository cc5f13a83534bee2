"""A bundle's tokenizer and chat template, which convert text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import check_variables, reads_tools, render
from castiron.pipelines.text.history import Adapter, normal_messages
from castiron.pipelines.text.reasoning import Marks, marks_of
from castiron.pipelines.text.special_tokens import SpecialTokens
from castiron.pipelines.text.tool_formats import HERMES, ToolFormat
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.json_record import short

if TYPE_CHECKING:
    import tokenizers

    from castiron.pipelines.text.grammar import Grammar, Grammars
    from castiron.vmfb.bundle.archive import Part

# Texts of more characters are encoded without holding the GIL.
LONG = 20_000
# Texts of up to this many characters are encoded before the number of tokens is checked.
COUNTED = 100_000
REPLACEMENT = "\ufffd"
# Private use characters that are appended to the last message, to find its end in the rendered text.
CUT = "\ue0c1\ue0c2\ue0c3"
# Number of last prompt tokens that are searched for a mark that starts reasoning.
PROMPT_END = 16


def check_utf8(text: str, name: str = "the prompt") -> str:
    """Return `text`; raise PipelineError if it has lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PipelineError(f"{name} is not valid UTF-8 ({error.object[error.start]!a}); give text in UTF-8") from None
    return text


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Convert the tokenizers library's errors in the `with` body to PipelineError."""
    try:
        yield
    except BaseException as error:
        # The library raises a bare Exception, or a panic, which is not an Exception.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise PipelineError(f"the model's tokenizer fails on this text ({short(str(error))}); change the text") from None


def encode_text(
    backend: tokenizers.Tokenizer, text: str, second: str | None = None, add_special_tokens: bool = True
) -> tokenizers.Encoding:
    """Return the encoding of a text or pair; raise PipelineError if the library fails."""
    with tokenizer_errors():
        if len(text) > LONG and second is None:
            # The library releases the GIL in `encode_batch`, but not in `encode`.
            return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return backend.encode(text, second, add_special_tokens=add_special_tokens)


class Tokenizer:
    """The tokenizer and the chat template of a bundle.

    template_args: defaults of the template's variables. tool_format: if None, messages describe
    tools as text and ask for calls as of the Hermes models. parse_special: whether <|im_end|> in a
    message becomes this token. fim: ids by llama.cpp's names, "pre", "suf" and others; what is
    missing is found by its text. special: texts by name, such as "bos_token".
    """

    def __init__(
        self, backend, chat_template: str | None = None, bos: int | None = None, eos: Sequence[int] = (),
        template_args: Mapping[str, object] | None = None, vocab: int | None = None,
        tool_format: ToolFormat | None = None, parse_special: bool = False, fim: Mapping[str, int] = MappingProxyType({}),
        special: Mapping[str, str] | None = None,
    ):  # fmt: skip
        self.backend, self.chat_template, self.bos, self.eos, self.fim = backend, chat_template, bos, tuple(eos), fim
        if special is None:
            ids = {"bos_token": bos, "eos_token": next(iter(eos), None)}
            special = {name: backend.id_to_token(index) for name, index in ids.items() if index is not None}
        self.special = special
        # The file may have the padding and truncation that were used for training.
        backend.no_truncation()
        backend.no_padding()
        self.template_args, self.parse_special = dict(template_args or {}), parse_special
        self.tool_format = tool_format or HERMES
        self._adapter = Adapter(self._rendered, self.tool_format, tool_format is None or not reads_tools(chat_template))
        check_variables(chat_template, self.template_args)
        self.vocab = vocab or backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self.marks = marks_of(chat_template or "", (str(token.content) for token in added.values()))
        tool_texts = "\n".join(self.tool_format.texts)
        self.tool_marks = {str(token.content) for token in added.values() if str(token.content) in tool_texts}
        shown = {mark for marks in (*self.marks, self.tool_marks) for mark in marks}
        # `decode` leaves out special tokens, except the marks of reasoning and tool calls.
        self._silent = frozenset(n for n, token in added.items() if token.special and str(token.content) not in shown)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a plain text, by default with special tokens such as BOS."""
        return encode_text(self.backend, check_utf8(text), add_special_tokens=add_special_tokens).ids

    def offsets(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the index of each token's first character in the text of a prompt."""
        found, end = [], 0
        if not isinstance(prompt, str):
            detokeniser = Detokeniser(self)
            for token in prompt:
                found.append(end)
                end += len(detokeniser.add(token))
            return found
        for first, last in encode_text(self.backend, prompt).offsets:
            # White space before a word belongs to the word's token, but some tokenizers leave it
            # out. A special token has no characters.
            found.append(min(first, end) if last > first else end)
            end = max(end, last)
        return found

    def encode_chat(self, messages: Sequence[Mapping], **variables) -> list[int]:
        """Return the token ids of a conversation rendered by the chat template."""
        return self._encode_rendered(*self._render_broken(messages, variables))

    def encode_unfinished_chat(self, messages: Sequence[Mapping], **variables) -> list[int]:
        """Return the token ids of a conversation whose last message the model will continue."""
        *before, last = normal_messages(messages)
        unfinished = [*before, {**last, "content": last["content"] + CUT}]
        rendered, mark = self._render_broken(unfinished, {**variables, "add_generation_prompt": False})
        text, found, _ = rendered.partition(CUT)
        if not found:
            raise PipelineError(
                "cannot continue the last message: this model's chat template leaves it out; ask for a new answer"
            )
        return self._encode_rendered(text, mark)

    def _render_broken(self, messages: Sequence[Mapping], variables: Mapping) -> tuple[str, str]:
        """Render with a break character in special tokens of messages; return (text, character)."""
        given, mark = {"messages": normal_messages(messages), **self.template_args, **variables}, ""
        if self.chat_template is not None and not self.parse_special:
            given, mark = self.special_tokens.broken(given)
        return self._render(**given), mark

    def _encode_rendered(self, text: str, mark: str) -> list[int]:
        # Add no special tokens, because the template has written them.
        if self.parse_special:
            return self.encode(text, add_special_tokens=False)
        return encode_text(*self.special_tokens.sanitised(check_utf8(text), mark), add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping], **variables) -> str:
        """Return the text of `messages` that `encode_chat` converts to ids."""
        return self._render(normal_messages(messages), **(self.template_args | variables))

    def encode_roles(self, messages: Sequence[Mapping]) -> list[int]:
        """Return the token ids of messages with roles of the template's own, such as query."""
        given, mark = self.special_tokens.broken({"messages": [dict(message) for message in messages]})
        return self._encode_rendered(self.render_roles(given["messages"]), mark)

    def render_roles(self, messages: Sequence[Mapping]) -> str:
        """Return the text that `encode_roles` converts to ids; no message is changed."""
        return self._rendered([dict(message) for message in messages], None, {"add_generation_prompt": False})

    def _render(self, messages: list[dict[str, Any]], tools: Any = None, **variables) -> str:
        return self._rendered(*self._adapter.adapted(messages, tools, variables), variables)

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any]) -> str:
        if self.chat_template is None:
            raise PipelineError("this model has no chat template; give the prompt as it is with --raw")
        return render(self.chat_template, messages, special_tokens=self.special, tools=tools, **variables)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens, whose texts in messages are encoded as plain text."""
        answers = {mark for pair in self.marks for mark in pair}
        # An assistant's message may contain the marks of tool calls, except Harmony's, which start turns.
        if self.tool_format.style != "harmony":
            answers |= self.tool_marks
        return SpecialTokens(self.backend, self.chat_template or "", answers)

    def end_of(self, prompt: Iterable[int]) -> str:
        """Return the text of a prompt's last `PROMPT_END` tokens, including special tokens."""
        with tokenizer_errors():
            return self.backend.decode([*prompt][-PROMPT_END:], skip_special_tokens=False)

    @property
    def answer_marks(self) -> Marks:
        """Pairs of texts around what may precede an answer, which no grammar restricts."""
        return (("", "<|channel|>final<|message|>"),) if self.tool_format.style == "harmony" else self.marks

    def grammar(self, **given: Any) -> Grammar:
        """Compile a grammar; given: the arguments of `Grammars.compile`."""
        return self.grammars.compile(**given)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self.backend.get_vocab()))

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """The bytes of every token of the model, by id; empty for unused ids."""
        return list(map(self.token_bytes, range(self.vocab)))

    @cached_property
    def grammars(self) -> Grammars:
        from castiron.pipelines.text.grammar import Grammars

        return Grammars(self.backend, self.vocabulary, self.eos)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`, without special tokens such as the end-of-turn token."""
        with tokenizer_errors():
            return self.backend.decode([token for token in tokens if token not in self._silent], skip_special_tokens=False)


def load_tokenizer(
    bundle: Bundle | Path | str, template_args: Mapping[str, object] | None = None, parse_special: bool = False,
    lazy: bool = False,
) -> Tokenizer:  # fmt: skip
    """Return the tokenizer of a bundle; raise PipelineError if it has no valid one."""
    bundle = open_bundle(bundle)
    if bundle.tokenizer is None:
        raise PipelineError(f"{bundle.path} has no tokenizer, because its checkpoint had none; give token ids with --tokens")
    load, backend = partial(_read_tokenizer, bundle.tokenizer), None
    if lazy and (table := bundle.token_table):
        from castiron.pipelines.text.lazy_tokenizer import LazyTokenizer

        backend = LazyTokenizer(table, load)
    tokens, tool_format = bundle.manifest.tokens, ToolFormat.of(bundle.manifest)
    return Tokenizer(
        backend or load(), bundle.chat_template, tokens.bos, tokens.eos, template_args, bundle.manifest.vocab, tool_format,
        parse_special, tokens.fim, tokens.special,
    )  # fmt: skip


def _read_tokenizer(file: Part) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_buffer(file.read_bytes())
    except Exception as error:  # tokenizers raises Exception itself
        raise PipelineError(f"cannot read {file} ({short(str(error))}); compile the bundle again") from None


class Detokeniser:
    """A streaming detokenizer, which never splits a character."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # The text of tokens[start:done] was returned; tokens[done:] end inside a character.
        self.start = self.done = 0

    def add(self, token: int) -> str:
        """Append a token; return the new text, which is empty while a character is incomplete."""
        self.tokens.append(token)
        returned, text = self._decode(self.done), self._decode(None)
        if len(text) <= len(returned) or text.endswith(REPLACEMENT):
            return ""
        self.start, self.done = self.done, len(self.tokens)
        return text[len(returned) :]

    def finish(self) -> str:
        """Return U+FFFD if the text ends inside a character, otherwise an empty string."""
        rest = self._decode(None)[len(self._decode(self.done)) :]
        self.start = self.done = len(self.tokens)
        return rest

    def _decode(self, end: int | None) -> str:
        return self.tokenizer.decode(self.tokens[self.start : end])


class TokenBytes:
    """Converts a token id to the token's bytes, which may be only a part of a character.

    Unused ids have none. GPT-2 stores a byte as a character, SentencePiece a space as U+2581.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.byte_level = b"ByteLevel" in (tokenizer.decoder.__getstate__() if tokenizer.decoder else b"")
        self.alphabet = byte_alphabet()

    def __call__(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        name = self.tokenizer.id_to_token(token) or ""
        if self.byte_level and all(letter in self.alphabet for letter in name):
            return bytes(self.alphabet[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD in place of an incomplete character."""
        return self(token).decode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """Return the inverse of `bytes_to_unicode` in GPT-2's code."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
