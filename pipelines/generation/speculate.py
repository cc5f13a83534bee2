"""Speculation that changes nothing but the speed: proposed tokens are checked, several in one pass over the weights.

Proposals come from the text itself (`ngrams`) and from a smaller model (`draft`). Behind each of them the model's own choice is
made as ever, by the likeliest token or by the text's next random number; a proposal is kept as long as it is that choice
(Leviathan et al., arXiv 2211.17192, in its greedy form).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.costs import Costs
from castiron.pipelines.generation.draft import Draft, Guess
from castiron.pipelines.generation.ngrams import LONGEST as LONGEST
from castiron.pipelines.generation.ngrams import SHORTEST as SHORTEST
from castiron.pipelines.generation.ngrams import Ngrams, Odds
from castiron.pipelines.generation.positions import stand_after
from castiron.pipelines.generation.sequence import Event
from castiron.pipelines.generation.sequence import Sequence as Text
from castiron.vmfb.program import NoNumbers
from castiron.vmfb.states import Snapshot

# Share of the time that proposals from the text may lose in all, and those of both sources; with what a first try costs it
# stays below 5 % of a text.
LOSS, LOSS_OF_ALL = 0.02, 0.04
# Of what proposals from the text have saved, and the draft with earlier texts, what the draft may lose besides.
SPENT_GAINS = 0.25
# A draft that does not pay is tried again after so many tokens, then after twice as many, up to the last.
WAIT, LONGEST_WAIT = 8, 256
# What a draft has to read at once counts for so many passes.
PASSES = 8


@dataclass
class Told:
    """Of one source: proposed tokens that were checked, those that were right, and seconds that it cost more than it saved."""

    proposed: int = 0
    accepted: int = 0
    lost: float = 0.0


@dataclass
class Pass:
    """What the model said at once: `says[i]` after `tokens[i]`, the first of which is the text's and the others, from
    `source`, proposed. `taken`: how many choices were made; `guesses`: what the draft expected of them;
    `doubtful`: the last choice was left to a step."""

    tokens: list[int]
    says: list[int]
    source: str | None = None
    before: Snapshot | None = None
    guesses: list[Guess] = field(default_factory=list)
    seconds: float = 0.0
    taken: int = 0
    doubtful: bool = False


class Speculator:
    """Feeds a session with a text, one token or several a pass.

        while text.finish_reason is None:
            if not speculator.ready:
                speculator.feed(tokens that the session has not)
            events = speculator.advance()

    `told`: by source; `passes` counts calls that checked proposals, `spent` the seconds of all, `drafting` the draft's share;
    `prompt_seconds`, which the caller sets, is how long the prompt took.
    """

    def __init__(
        self,
        session,
        text: Text,
        history: Collection[int] = (),
        draft: Draft | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`history`: the tokens that stand in the session before the text's prompt. PipelineError for a bundle that was
        compiled without verify functions."""
        self.session, self.text, self.draft, self.clock = session, text, draft, clock
        self.widths = session.manifest.widths("verify")
        if not self.widths:
            raise PipelineError("this bundle was compiled without verify functions; compile it with --speculate 4,8")
        self.ngrams, self.odds = Ngrams([*history, *map(int, text.prompt)]), Odds()
        self.costs = draft.costs if draft else Costs()
        self.told = {"ngram": Told()} | ({"draft": Told()} if draft else {})
        self.passes, self.spent, self.drafting, self.prompt_seconds = 0, 0.0, 0.0, 0.0
        self._pass: Pass | None = None
        # How many of the text's tokens are noted; tokens until the draft is tried again, and what that then waits.
        self._noted = self._until = 0
        self._wait, self._trying, self._start = WAIT, False, 0
        self._saved = draft.saved if draft else 0.0

    @property
    def proposed(self) -> int:
        return sum(told.proposed for told in self.told.values())

    @property
    def accepted(self) -> int:
        return sum(told.accepted for told in self.told.values())

    def __str__(self) -> str:
        by = [f"{told.proposed} by the {'text' if name == 'ngram' else name}" for name, told in self.told.items()]
        sources = f" ({', '.join(by)}, {self.draft_share:.0%} of the time)" if self.draft else ""
        return f"{self.accepted} of {self.proposed} proposed tokens were right{sources}"

    def report(self) -> dict:
        """What there is to tell, for JSON."""
        sources = {name: {"proposed": told.proposed, "accepted": told.accepted} for name, told in self.told.items()}
        return {"passes": self.passes, "draft_share": round(self.draft_share, 4), "sources": sources}

    @property
    def draft_share(self) -> float:
        """Of the seconds since the prompt, those of the draft."""
        return self.drafting / self.spent if self.spent else 0.0

    @property
    def ready(self) -> bool:
        """Whether the next token can be chosen."""
        return self._pass is not None

    def feed(self, tokens: Sequence[int]) -> None:
        """Feeds `tokens`, the last of the text, and maybe proposals behind them; the text is then `ready`."""
        for token in self.text.tokens[self._noted :]:
            self._note(token)
        if len(tokens) > 1:
            self._pass = Pass(list(tokens), [self.session.prefill(tokens)])
            return
        (token,), start = tokens, self.clock()
        source, count = self._plan()
        if source == "draft":
            self._pass = self._ask(token, count)
        elif source:
            self._pass = self._check(token, self.ngrams.propose(count), source)
        else:
            self._pass = self._step(token)
        self._pass.seconds = self.clock() - start

    def advance(self) -> list[Event]:
        """The text's next token, and what it has to tell."""
        assert self._pass is not None
        found, at = self._pass, self._pass.taken
        argmax, logits, chosen = self._choose(found, at)
        found.taken = at + 1
        if at < len(found.guesses) and self.draft:
            self.draft.trust.learn(found.guesses[at], chosen == found.guesses[at].token)
        right = found.before is not None and at + 1 < len(found.tokens) and chosen == found.tokens[at + 1]
        if right and found.source:
            self.told[found.source].accepted += 1
        events = self.text.advance(argmax, logits, chosen)
        if not right or self.text.finish_reason is not None or found.doubtful:
            self._end(found)
        return events

    def settle(self) -> None:
        """Leaves the session behind what was asked for: before the text's last token. For who does not go on."""
        if self._pass:
            self._end(self._pass)

    def _note(self, token: int) -> None:
        if length := self.ngrams.length:
            self.odds.learn(length, self.ngrams.propose(1)[0] == token)
        self.ngrams.add(token)
        self._noted += 1
        self._until -= 1

    def _choose(self, found: Pass, at: int) -> tuple[int, Callable[[], np.ndarray], int]:
        """The most probable token behind `found.tokens[at]`, the logits, and what is chosen of them. What was checked together
        is looked at twice: where its sums might decide, a step does."""
        argmax, chooser, session = found.says[at], self.text.chooser, self.session
        if argmax < 0:
            raise NoNumbers
        if found.before is None:
            return argmax, session.logits, chooser.pick(argmax, session.logits)
        start = self.clock()
        logits = lambda: session.verified_logits(at)
        chosen = chooser.pick_surely(argmax, logits)
        if chosen is None:
            found.doubtful = True
            stand_after(session, found.before, found.tokens[:at])
            argmax, logits = session.step(found.tokens[at]), session.logits
            chosen = chooser.pick(argmax, logits)
        found.seconds += self.clock() - start
        return argmax, logits, chosen

    def _end(self, found: Pass) -> None:
        """Leaves the session behind the tokens that were right, and counts what the pass brought."""
        self._pass = None
        before = found.before
        if before and self.session.position != before.position + found.taken:
            start = self.clock()
            stand_after(self.session, before, found.tokens[: found.taken])
            found.seconds += self.clock() - start
        self.spent += found.seconds
        if found.source:
            lost = found.seconds - found.taken * self.costs.of(1)
            self.told[found.source].lost += lost
            if self.draft and found.source == "draft":
                self.draft.saved -= lost

    def _step(self, token: int) -> Pass:
        start = self.clock()
        found = Pass([token], [self.session.step(token)])
        self.costs.learn(1, self.clock() - start)
        return found

    def _check(self, token: int, proposal: list[int], source: str) -> Pass:
        start, tokens = self.clock(), [token, *proposal]
        width = self._width(len(proposal))
        before = self.session.snapshot(width)
        says = self.session.verify([*tokens, *[0] * (width - len(tokens))])
        self.costs.learn(width, self.clock() - start)
        self.passes += 1
        self.told[source].proposed += len(proposal)
        return Pass(tokens, says, source, before)

    def _width(self, count: int) -> int:
        """That checks `count` proposals."""
        return min(width for width in self.widths if width > count)

    def _plan(self) -> tuple[str | None, int]:
        """The source with the most tokens a second to expect, and how many proposals it is asked for; None is a step."""
        room = self.session.context - self.session.position
        widest = max((width for width in self.widths if width <= room), default=1)
        left = self.text.limit - len(self.text.tokens)
        if not self.costs.known or widest == 1 or left == 1:
            return None, 0
        step = 1 / self.costs.of(1)
        rate, source, count = max((step, None, 0), self._from_text(widest, left), key=lambda option: option[0])
        if self.draft and (wanted := self._from_draft(widest, left, rate)):
            source, count = "draft", wanted
        return source, count

    def _from_text(self, widest: int, left: int) -> tuple[float, str, int]:
        """Tokens a second with proposals from the text, and how many of them."""
        length, told = self.ngrams.length, self.told["ngram"]
        if not length or told.lost > LOSS * self.spent:
            return 0.0, "ngram", 0
        most = min(left, 1 + self._fitting(widest))
        options = [(min(self.odds.tokens(length, width), most) / self.costs.of(width), "ngram", width - 1)
                   for width in self.widths if width <= widest and most > 1]  # fmt: skip
        return max(options, default=(0.0, "ngram", 0))

    def _from_draft(self, widest: int, left: int, other: float) -> int:
        """How many proposals the draft is asked for; 0 where `other` tokens a second are more, or a try is not due."""
        assert self.draft
        credit = self._credit()
        most = min(widest, left) - 1
        few = min(self.widths[0] - 1, most)
        # What a try loses that brings nothing.
        least = self._cost(few) - self.costs.of(1)
        plan = self.draft.plan(self.ngrams.tokens, credit - least) if credit > least else None
        if plan is None:
            return 0
        self._start, reading = plan
        affordable = [count for count in range(1, most + 1) if self._cost(count) - self.costs.of(1) + reading <= credit]
        rates = {count: self._rate([], count, reading / PASSES) for count in affordable}
        best = max(rates, key=rates.__getitem__, default=0)
        self._trying = not best or rates[best] <= other
        if not self._trying:
            self._wait = WAIT
            return max(affordable)
        if few in affordable and self._until <= 0 and other <= 1 / self.costs.of(1):
            self._until, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
            return few
        return 0

    def _credit(self) -> float:
        """Seconds that the draft may lose now."""
        assert self.draft
        gains = max(0.0, self._saved) + max(0.0, -self.told["ngram"].lost)
        lost = self.told["draft"].lost + max(0.0, self.told["ngram"].lost)
        return LOSS_OF_ALL * (self.spent + self.prompt_seconds) + SPENT_GAINS * gains - lost

    def _cost(self, count: int) -> float:
        """Seconds of a pass over so many proposals of the draft."""
        assert self.draft
        return self.costs.of(self._width(count)) + count * self.draft.step_seconds

    def _rate(self, guesses: Sequence[Guess], count: int, more: float = 0.0) -> float:
        """Tokens a second to expect of `count` proposals that begin with `guesses`; `more` seconds are spent besides."""
        assert self.draft
        trust, expected, probability = self.draft.trust, 1.0, 1.0
        for index in range(count):
            probability *= trust.of(guesses[index]) if index < len(guesses) else trust.usual
            expected += probability
        return expected / (self._cost(count) + more)

    def _ask(self, token: int, most: int) -> Pass:
        """A pass over what the draft proposes, up to `most`, as long as one more is worth it; a step where nothing is."""
        assert self.draft
        draft, start = self.draft, self.clock()
        trying = self._trying

        def go_on(guesses: list[Guess]) -> bool:
            done = len(guesses)
            more = range(done + 1, most + 1)
            return done < most and (trying or max(self._rate(guesses, n) for n in more) > self._rate(guesses, done))

        guesses = draft.propose(self.ngrams.tokens, self._start, self.text.chooser.trial(), go_on)
        self.drafting += self.clock() - start
        alone = 1 / (self.costs.of(1) + len(guesses) * draft.step_seconds)
        if guesses and (trying or self._rate(guesses, len(guesses)) > alone):
            found = self._check(token, [guess.token for guess in guesses], "draft")
        else:
            found = self._step(token)
            found.source = "draft"
        found.guesses = guesses
        return found

    def _fitting(self, width: int) -> int:
        """How many tokens of a proposal from the text the constraint allows, of which there are `width` - 1 at most."""
        if not self.text.constraint:
            return width
        trial, count = self.text.constraint.copy(), 0
        for each in self.ngrams.propose(width - 1):
            if trial.done or not trial.allows(each):
                break
            trial.accept(each)
            count += 1
        return count
