"""Steps of a simulated decoding node that compute a prompt beside its rows, sized by the daemons' own token budget.

A step takes what its rows take, and what each token of the chunk adds. Imports that take the processor's time make
steps longer; the budget sees that, as it does in the daemons, and gives prompts less so that streams keep their pace.
Knows no queue. Called by nodes.py at each step; site.py builds it.
"""

from __future__ import annotations

from common.sched.budget import TokenBudget, joint_size
from common.sim.nodes import DecodeNode, Processor


class Mixing(Processor):
    """A decoding node's processor. `token_ratio`: how many times as long a token of a prompt takes in a step with rows
    as in a chunk of its own; `chunk_tokens` and `max_stretch` as of TokenBudget.
    """

    is_shared = True

    def __init__(self, decode: DecodeNode, chunk_tokens: int, max_stretch: float, token_ratio: float) -> None:
        super().__init__(chunk_tokens)
        self._decode, self._token_ratio = decode, token_ratio
        self._budget = TokenBudget(chunk_tokens, max_stretch=max_stretch)
        # As of daemons that have served before: what so many rows take alone is known.
        for rows in range(1, decode.max_rows + 1):
            self._budget.note_quiet(rows, decode.cost.step_s(rows))
        self._has_mixed = False
        self._rows = self._num_tokens = 0  # of the step that is computed

    def wants_quiet(self) -> bool:
        if not self._decode.num_rows:
            return False
        if not self._has_mixed:
            # Until now its rows ran alone, and the daemons look at every such step.
            self._budget.note_quiet(self._decode.num_rows, self._decode.alone_s)
            self._has_mixed = True
        return self._budget.wants_quiet()

    def num_tokens(self, num_left: int) -> int:
        rows = self._decode.num_rows
        if not rows:
            return super().num_tokens(num_left)
        size = min(self._budget.joint_tokens(rows) or self._budget.tokens(rows), num_left)
        return joint_size(size) if size == num_left else size

    def begin(self, num_tokens: int, chunk_s: float) -> float:
        self._rows, self._num_tokens = self._decode.num_rows, num_tokens
        if not self._rows:
            self._has_mixed = False
            self._decode.share(1.0)
            return chunk_s
        alone_s = self._decode.alone_s
        took_s = alone_s + self._token_ratio * chunk_s
        self._decode.share(took_s / alone_s)
        return took_s

    def end(self, took_s: float) -> None:
        if self._rows and self._num_tokens:
            self._budget.note_chunk(self._num_tokens, self._rows, took_s)
        elif self._rows:
            self._budget.note_quiet(self._rows, took_s)
        self._decode.step_over()

    def stop(self) -> None:
        self._has_mixed = False
        self._decode.set_stretch(1.0)
