"""Plain frozen data about one request, shared by API, policies, scheduler, engine and wire. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Route = Literal["local", "remote"]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated by the API; the engine trusts it.

    `top_k` 0, `top_p` 1.0, `min_p` 0.0 and penalties of 0 / 1 mean "off"; temperature 0 is greedy (ties: lower id).
    `logprobs` is the number of alternatives wanted per token (0 = the chosen token's only, None = none).
    `stop_token_ids` end the sequence like EOS. Stop *strings* are matched by the API on the text.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for: one prompt, `num_choices` samples of it.

    `prompt_logprobs` asks for the log probability of every prompt token (echo with logprobs). `forced_route` comes from
    X-Prfaas-Route and is only set when the configuration allows it. `deadline_s`, a duration from arrival, is for the
    first token; within `due_s` it is in time (None: whenever it comes). `priority` follows from `service_class` ("":
    the first one). Without `uses_cache` nothing is looked up in the prefix cache, and nothing kept there.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    prompt_logprobs: int | None = None
    forced_route: Route | None = None
    deadline_s: float | None = None
    due_s: float | None = None
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    uses_cache: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_tokens)

    @property
    def state_tokens(self) -> int:
        """Tokens whose state one choice can need at most: the last output token's state is never computed."""
        return self.num_prompt_tokens + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of one token and of its best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token of one choice. `finish_reason` is set on a choice's last token (EOS itself included)."""

    choice: int
    token_id: int
    num_output_tokens: int
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Sent once before the first TokenOutput when asked for: entry i belongs to prompt token i; entry 0 is None."""

    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(slots=True)
class Timing:
    """The parts of one request's TTFT in seconds, each measured where it happens.

    queue_s: arrival to admission, and the local engine's queue; route_s: deciding; failed_remote_s: attempts at peers
    that came to nothing; remote_queue_s: Prefill sent until the peer's first chunk starts, and its waiting between
    chunks for those of other prompts; prefill_s: computing the prompt (at a peer its own chunks alone, here from the
    first chunk to the last); transfer_s: only what was not hidden behind compute; import_s: last verified byte until
    the sequence may join the batch; first_token_s: joining until the first token is handed out.
    """

    queue_s: float = 0.0
    route_s: float = 0.0
    failed_remote_s: float = 0.0
    remote_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    import_s: float = 0.0
    first_token_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(slots=True)
class RequestReport:
    """What happened to one request: returned under `prfaas` with X-Prfaas-Timing, kept for `decodectl explain`.

    `predicted_ttft_s`, from arrival, is what the first routing decision expected, whatever came of it; None where it
    could not. Cached tokens are those that nobody computed for this request.
    """

    request_id: str
    route: Route = "local"
    peer: str | None = None
    reason: str = ""
    predicted_ttft_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    uncached_tokens: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    codec: str | None = None
    timing: Timing = field(default_factory=Timing)
    outcome: str = ""
    warning: str = ""
