"""Between text and token ids: a bundle's tokenizer, and detokenising as the tokens come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat_template import check_variables, prepare, render
from castiron.pipelines.generation.control_words import ControlWords
from castiron.pipelines.generation.thoughts import Marks, Thoughts, marks_of
from castiron.pipelines.generation.tokenizing import by_the_library, encoded, encoding_of, utf8
from castiron.pipelines.generation.tool_forms import FORMS, ToolForm
from castiron.pipelines.generation.trial import Trial
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.manifest import TEMPLATE, TOKENIZER

if TYPE_CHECKING:
    from castiron.pipelines.generation.grammar import Grammar, Grammars
    from castiron.pipelines.generation.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
# Where a text is cut off that a template renders; no text has it.
CUT = "\ue0c1\ue0c2\ue0c3"
# Tokens at the end of a prompt in which a mark that begins thoughts may stand.
PROMPT_END = 16


class Text:
    """The tokenizer and the chat template of a bundle."""

    def __init__(
        self,
        tokenizer,
        chat_template: str | None = None,
        bos: int | None = None,
        eos: Sequence[int] = (),
        template_args: Mapping[str, object] | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        tool_form: ToolForm | None = None,
        parse_special: bool = False,
    ):
        """`template_args`: values for variables of the template, unless a call gives others; PipelineError for one that
        the template does not read. `vocabulary` reads that of the bundle; the tokenizer's own without it. `tool_form`: how
        the template has functions called. `parse_special`: control words in messages are control tokens, as the template's
        own are, and not the text that somebody said.
        """
        self.tokenizer, self.parse_special = tokenizer, parse_special
        # A file may have settings of its own for the batches in which it was trained.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.chat_template = chat_template
        self.bos = bos
        self.eos = tuple(eos)
        self.template_args = dict(template_args or {})
        check_variables(chat_template, self.template_args)
        self.tool_form = tool_form
        self._vocabulary = vocabulary
        added = tokenizer.get_added_tokens_decoder()
        self.marks = marks_of(chat_template or "", (str(token.content) for token in added.values()))
        form = (tool_form.begin, tool_form.end, *tool_form.marks) if tool_form else ()
        shown = {word for words in (*self.marks, form) for word in words}
        # Special tokens that are no part of the text; what tells thoughts and calls apart is.
        self._silent = frozenset(n for n, token in added.items() if token.special and str(token.content) not in shown)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; with a BOS where the model's tokenizer puts one."""
        return self._encode(text, True)

    def offsets(self, prompt: str | Sequence[int]) -> list[int]:
        """Where in its text each token of a prompt begins, in characters: of text as it is encoded, of ids as decoded."""
        found, end = [], 0
        if not isinstance(prompt, str):
            detokeniser = Detokeniser(self)
            for token in prompt:
                found.append(end)
                end += len(detokeniser.add(token))
            return found
        for first, last in encoding_of(self.tokenizer, prompt).offsets:
            # White space before a word is its token's, though some tokenizers leave it out; a special token has no place.
            found.append(min(first, end) if last > first else end)
            end = max(end, last)
        return found

    def encode_chat(self, messages: Sequence[Mapping], **variables) -> list[int]:
        """The ids of `messages` ({"role", "content"} each) in the chat template; PipelineError if there is none."""
        text, mark = self._rendered_apart(messages, variables)
        return self._encode_rendered(text, mark)

    def encode_unfinished_chat(self, messages: Sequence[Mapping], **variables) -> list[int]:
        """The ids of `messages` up to the end of the last one's content, which the model is to go on with; PipelineError if the
        template does not show it."""
        *before, last = messages
        unfinished = [*before, {**last, "content": last["content"] + CUT}]
        whole, mark = self._rendered_apart(unfinished, {**variables, "add_generation_prompt": False})
        text, found, _ = whole.partition(CUT)
        if not found:
            raise PipelineError("this model's chat template does not show the last message, so that none can go on with it")
        return self._encode_rendered(text, mark)

    def _rendered_apart(self, messages: Sequence[Mapping], variables: Mapping) -> tuple[str, str]:
        """The template's text of `messages`, and what stands in it within words that were said and are no control tokens."""
        given, mark = {"messages": list(messages), **self.template_args, **variables}, ""
        if self.chat_template is not None and not self.parse_special:
            given, mark = self.control_words.broken(given)
        return self._rendered(**given), mark

    def _encode_rendered(self, text: str, mark: str) -> list[int]:
        # The template has written the special tokens itself.
        return self._encode(text, False) if self.parse_special else self.control_words.encode(utf8(text), mark)

    def render_chat(self, messages: Sequence[Mapping], **variables) -> str:
        """The text whose ids `encode_chat` gives."""
        return self._rendered(messages, **(self.template_args | variables))

    def _rendered(self, messages: Sequence[Mapping], **variables) -> str:
        if self.chat_template is None:
            raise PipelineError("this model has no chat template; give the prompt as it is with --raw")
        names = {"bos_token": self.bos, "eos_token": self.eos[0] if self.eos else None}
        special = {name: self.tokenizer.id_to_token(index) for name, index in names.items() if index is not None}
        return render(self.chat_template, messages, special_tokens=special, **variables)

    @cached_property
    def control_words(self) -> ControlWords:
        """Of the template's text; made when messages are first encoded."""
        form, answers = self.tool_form, {word for pair in self.marks for word in pair}
        # Harmony's open turns too.
        if form and form.name != "harmony":
            answers |= {form.begin, form.end, *form.marks}
        return ControlWords(self.tokenizer, self.chat_template or "", answers)

    def thoughts(self, prompt: Sequence[int]) -> Thoughts | None:
        """What tells the model's thoughts from its answer after `prompt`, whose end may have begun them; None for a model
        that has no marks for them."""
        if not self.marks:
            return None
        return Thoughts(self.marks, self.end_of(prompt))

    def end_of(self, prompt: Sequence[int]) -> str:
        """The text of a prompt's last tokens, with its special ones: enough for a mark, which is a few at most."""
        with by_the_library():
            return self.tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)

    @property
    def answer_marks(self) -> Marks:
        """What stands around all that comes before an answer, which a grammar leaves free."""
        harmony = self.tool_form and self.tool_form.name == "harmony"
        return (("", "<|channel|>final<|message|>"),) if harmony else self.marks

    def call_grammar(self, schemas: Mapping[str, Any], parallel: bool, answer: Any = None, free: bool = False) -> Grammar:
        """What holds a generation to calls of these functions, in the form of the template, or to an `answer` of that JSON
        schema, or its calls alone among words that are `free`; `schemas` are of their parameters."""
        from castiron.pipelines.generation.tool_grammar import ToolGrammar

        added = self.tokenizer.get_added_tokens_decoder()
        special = {added[i].content: i for i in self.grammars.special if i in added}
        grammar = self.grammar(grammar=ToolGrammar(self.tool_form, special).text(schemas, parallel, answer, free))
        grammar.calls = True
        return grammar

    def grammar(
        self, *, json_schema: Mapping[str, Any] | bool | None = None, regex: str | None = None, grammar: str | None = None
    ) -> Grammar:
        """What holds a generation to a JSON schema, a regular expression or a grammar, one of them, as `Grammars.compile`
        says."""
        return self.grammars.compile(json_schema=json_schema, regex=regex, grammar=grammar)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry in the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def grammars(self) -> Grammars:
        """The vocabulary's, made when first asked for."""
        from castiron.pipelines.generation.grammar import Grammars
        from castiron.pipelines.generation.vocabulary import Vocabulary

        read = self._vocabulary or (lambda: Vocabulary.of(self.tokenizer, self.tokenizer.get_vocab_size()))
        return Grammars(self.tokenizer, read(), self.eos)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return encoded(self.tokenizer, utf8(text), add_special_tokens)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special ones left out but for those that tell thoughts and calls apart."""
        with by_the_library():
            return self.tokenizer.decode([token for token in tokens if token not in self._silent], skip_special_tokens=False)


def load_text(
    bundle: Bundle | Path | str, template_args: Mapping[str, object] | None = None, parse_special: bool = False
) -> Text:
    """The tokenizer of a bundle, or of the one at a path; PipelineError if it has none or if its file is not a tokenizer, or
    as `Text` says."""
    bundle = open_bundle(bundle)
    if TEMPLATE in bundle.manifest.files:
        # Beside what follows.
        prepare()
    if bundle.tokenizer is None:
        raise PipelineError(f"{bundle.path} has no tokenizer, because its checkpoint had none: give token ids with --tokens")
    from tokenizers import Tokenizer

    data, file = bundle.tokenizer.read_bytes(), bundle.manifest.files[TOKENIZER]
    with Trial(data, bundle.manifest.vocab, file.sha256) as trial:
        if fault := trial.fault():
            raise PipelineError(f"{bundle.tokenizer} has {fault}; compile the bundle again")
    manifest = bundle.manifest

    def vocabulary() -> Vocabulary:
        from castiron.pipelines.generation.vocabulary import read_vocabulary

        return read_vocabulary(bundle)

    return Text(
        Tokenizer.from_buffer(data),
        bundle.chat_template,
        manifest.tokens.bos,
        manifest.tokens.eos,
        template_args,
        vocabulary,
        FORMS.get(manifest.tool_form or ""),
        parse_special,
    )


class Detokeniser:
    """Text as its tokens come, never in the middle of a character.

    What `add` returns, and `finish` at the end, joins to what decoding all tokens at once gives. New tokens are decoded
    together with those before them, because a decoder may treat the first token of a text differently.
    """

    def __init__(self, text: Text):
        self.text = text
        self.tokens: list[int] = []
        # tokens[start:done] are told, tokens[done:] wait for the rest of a character.
        self.start = self.done = 0

    def add(self, token: int) -> str:
        """The text that is certain with this token; empty while a character is incomplete and for a special token."""
        self.tokens.append(token)
        told, whole = self._decode(self.done), self._decode(None)
        if len(whole) <= len(told) or whole.endswith(REPLACEMENT):
            return ""
        self.start, self.done = self.done, len(self.tokens)
        return whole[len(told) :]

    def finish(self) -> str:
        """What is left: a character that never became whole, as a replacement character."""
        rest = self._decode(None)[len(self._decode(self.done)) :]
        self.start = self.done = len(self.tokens)
        return rest

    def _decode(self, end: int | None) -> str:
        return self.text.decode(self.tokens[self.start : end])
