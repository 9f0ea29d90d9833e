"""What computing a prompt here would take, from the rates at which this engine was seen to compute prompts.

Beside running streams a prompt gets a part of every step only (the token budget), so its rate there is another one than
alone. Pure; shown by `decodectl explain` beside what it really took.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalRates:
    """Prompt tokens per second since the start; 0 before the first.

    Attributes:
        alone: while nothing was decoded.
        mixed: in steps that also decoded running streams, those steps counted whole.
    """

    alone: float = 0.0
    mixed: float = 0.0

    def prefill_s(self, num_tokens: int, num_rows: int) -> float | None:
        """Seconds for so many prompt tokens beside so many decode rows; None before anything like it was seen."""
        rate = (self.mixed if num_rows else self.alone) or (self.alone if num_rows else self.mixed)
        return num_tokens / rate if rate else None
