"""A session without a model, for tests of what runs a session."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


class FakeSession:
    """A `castiron.vmfb.run.session.Session` without a model; `fed`: the tokens that it has read."""

    def __init__(self, context: int = 10**6, eos=(), prefill_widths=(), verify=()):
        self.context, self.fed = context, []
        widths = {"prefill": prefill_widths, "verify": verify}
        self.manifest = SimpleNamespace(
            tokens=SimpleNamespace(eos=eos), widths=lambda role: widths.get(role, ()), original_context=None,
            is_long=lambda total: False,
        )  # fmt: skip

    @property
    def position(self) -> int:
        return len(self.fed)

    def is_valid_for(self, total: int) -> bool:
        return True

    def prefill(self, tokens, progress=None, total: int = 0) -> int:
        self.fed += map(int, tokens)
        assert self.position <= self.context
        return int(self.logits().argmax())

    def step(self, token: int) -> int:
        return self.prefill([token])

    def logits(self) -> np.ndarray:
        raise AssertionError("nothing may ask for logits")

    def keep(self) -> None:
        pass

    def reachable(self, position: int) -> int:
        return position

    def rewind(self, position: int) -> None:
        del self.fed[position:]

    def snapshot(self, ahead=None):
        return SimpleNamespace(position=self.position, stale=False)
