"""The program behind `decodectl codec check`: real text, its state through a codec, and what the model then says.

For each prompt: compute its state, cut it to segments as prefilld does, encode, decode into another slot. From both
slots go on with the text itself (teacher forcing: every position compared is one of the real text) and greedily.
Runs the engine in this process; no daemon, no network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from common.config_load import load_file
from common.config_machine import check_folder
from common.daemon import report_problems
from common.engine.runner import Runner
from common.errors import EXIT_OK, EXIT_RUNTIME, ConfigError, PdError
from common.request import SamplingParams
from common.sched.sequence import Chunk
from common.sched.sequence import Sequence as Row
from common.sched.specs import plan_segments
from common.text.tokenizer import Tokenizer
from common.wire.codec import CODECS, Codec, segment_shape
from common.wire.lossy import LOSSY
from common.wiring import load_runner
from decoded.codec_report import PARAMETERS, CodecReport, identity_of, store
from decoded.config import DecodeConfig

if TYPE_CHECKING:
    from common.sched.executor import Slot

PROG = "decodectl codec check"
EXIT_INTERRUPTED = 130
PROMPT_TOKENS, TEXT_TOKENS, GREEDY_TOKENS, NUM_PROMPTS = 1024, 128, 32, 8


@dataclass(slots=True)
class Sums:
    """What is added up over all prompts."""

    raw_bytes: int = 0
    num_values: int = 0
    encoded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    num_tokens: int = 0
    num_same: int = 0
    num_greedy: int = 0
    num_greedy_same: int = 0
    nll_raw: float = 0.0
    nll: float = 0.0
    kl: list[float] = field(default_factory=list)


class Check:
    """One codec on one model."""

    def __init__(self, runner: Runner, codec: str, segment_bytes: int, chunk_tokens: int) -> None:
        self.runner, self.codec = runner, codec
        self.segment_bytes, self.chunk_tokens = segment_bytes, chunk_tokens
        self.sums = Sums()
        self._coder = Codec()

    def prompt(self, tokens: list[int], num_prompt: int) -> None:
        """Compare on tokens[num_prompt:], whose state before comes from the rest."""
        room = len(tokens) + GREEDY_TOKENS
        source, plain, coded = (self.runner.new_slot(room) for _ in range(3))
        coded.prepare_import(num_prompt)
        self._compute(source, tokens, num_prompt, coded)
        plain.copy_from(source, num_prompt)
        source.free()
        raw, own = (self._follow(slot, tokens, num_prompt) for slot in (plain, coded))
        self._compare(raw, own, tokens[num_prompt + 1 :])
        for slot in (plain, coded):
            slot.free()

    def _compute(self, source: Slot, tokens: list[int], num_prompt: int, coded: Slot) -> None:
        """State of the prompt in `source`, and what the codec leaves of it in `coded`."""
        row = Row(0, None, tokens, source, None)
        layout = self.runner.facts.layout
        for start in range(0, num_prompt, self.chunk_tokens):
            span = (start, min(start + self.chunk_tokens, num_prompt))
            self.runner.prefill(Chunk(row, *span), lambda _layer: None)
            for plan in plan_segments(layout, span, (0, num_prompt), self.segment_bytes):
                shape = segment_shape(layout, plan.start, plan.stop, plan.layers)
                buffers = source.exported(plan.start, plan.stop, plan.layers)
                began = perf_counter()
                encoded = self._coder.encode(self.codec, buffers, shape)
                between = perf_counter()
                out = coded.writable(plan.start, plan.stop, plan.layers)
                sent = memoryview(b"".join(encoded.parts))
                if encoded.codec == "raw":
                    for target, buffer in zip(out, buffers, strict=True):
                        target[:] = buffer
                else:
                    self._coder.decode(encoded.codec, sent, out, shape)
                coded.landed(plan.start, plan.stop, plan.layers)
                self.sums.encode_s += between - began
                self.sums.decode_s += perf_counter() - between
                self.sums.raw_bytes += sum(run.num_bytes for run in shape)
                self.sums.num_values += sum(run.num_rows * run.num_channels for run in shape)
                self.sums.encoded_bytes += encoded.num_bytes

    def _follow(self, slot: Slot, tokens: list[int], num_prompt: int) -> tuple[torch.Tensor, list[int]]:
        """Log probabilities after each token of the text [tokens, vocab], and a greedy continuation of the prompt."""
        greedy_slot = self.runner.new_slot(len(tokens) + GREEDY_TOKENS)
        greedy_slot.copy_from(slot, num_prompt)
        greedy = Row(1, None, tokens[: num_prompt + 1], greedy_slot, SamplingParams(GREEDY_TOKENS, temperature=0.0))
        greedy.num_computed_tokens = num_prompt
        for _ in range(GREEDY_TOKENS):
            greedy.tokens.append(self.runner.decode([greedy])[0].token_id)
            greedy.num_computed_tokens += 1
        greedy_slot.free()
        row = Row(2, None, tokens, slot, None)
        logits = self.runner.logits(Chunk(row, num_prompt, len(tokens)))
        return torch.log_softmax(logits.double(), dim=-1), greedy.tokens[num_prompt + 1 :]

    def _compare(
        self, raw: tuple[torch.Tensor, list[int]], coded: tuple[torch.Tensor, list[int]], text: list[int]
    ) -> None:
        sums, (expected, greedy), (found, own) = self.sums, raw, coded
        sums.num_tokens += expected.shape[0]
        sums.num_same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        sums.kl += (expected.exp() * (expected - found)).sum(-1).tolist()
        following = torch.tensor(text)[:, None]
        sums.nll_raw -= float(expected[: len(text)].gather(1, following).sum())
        sums.nll -= float(found[: len(text)].gather(1, following).sum())
        same = next((n for n, (a, b) in enumerate(zip(greedy, own, strict=True)) if a != b), len(greedy))
        sums.num_greedy += len(greedy)
        sums.num_greedy_same += same

    def report(self, text: str, num_prompts: int) -> CodecReport:
        """All prompts together."""
        sums = self.sums
        num_following = sums.num_tokens - num_prompts  # the last position's next token is not part of the text
        return CodecReport(
            codec=self.codec,
            parameters=PARAMETERS,
            identity=identity_of(self.runner.facts),
            text=text,
            num_prompts=num_prompts,
            num_tokens=sums.num_tokens,
            ratio=sums.encoded_bytes / sums.raw_bytes,
            ratio_bf16=sums.encoded_bytes / (2 * sums.num_values),
            encode_mb_s=sums.raw_bytes / 1e6 / sums.encode_s,
            decode_mb_s=sums.raw_bytes / 1e6 / sums.decode_s,
            top1_agreement=sums.num_same / sums.num_tokens,
            greedy_agreement=sums.num_greedy_same / sums.num_greedy,
            perplexity_raw=float(torch.tensor(sums.nll_raw / num_following).exp()),
            perplexity=float(torch.tensor(sums.nll / num_following).exp()),
            kl_mean=sum(sums.kl) / len(sums.kl),
            kl_max=max(sums.kl),
        )


def prompts_of(tokens: Sequence[int], num_prompts: int, num_prompt: int) -> list[list[int]]:
    """Stretches of the text, evenly spread: `num_prompt` tokens to keep and TEXT_TOKENS to compare on.

    Raises:
        ValueError: the text is too short for one.
    """
    size = num_prompt + TEXT_TOKENS
    if len(tokens) < size:
        shorter = len(tokens) - TEXT_TOKENS
        hint = f", or --prompt-tokens {shorter} at most" if shorter > 0 else ""
        raise ValueError(
            f"the text has {len(tokens)} tokens, at least {size} are needed (--prompt-tokens {num_prompt} and"
            f" {TEXT_TOKENS} to compare on): give a longer one{hint}"
        )
    num = min(num_prompts, len(tokens) // size)
    gap = (len(tokens) - size) // max(1, num - 1) if num > 1 else 0
    return [list(tokens[n * gap : n * gap + size]) for n in range(num)]


def check(config: DecodeConfig, args: argparse.Namespace) -> Iterator[CodecReport]:
    """One report per codec, each as soon as it is there. All that can be refused is before the first.

    Raises:
        ValueError, PdError: no model, no place for reports, a text or prompts that do not fit.
        OSError: the text cannot be read.
    """
    folder, path = config.node.state_dir, config.model.path
    if folder is None or path is None:
        missing = " and ".join(n for n, v in (("node.state_dir", folder), ("model.path", path)) if v is None)
        raise ValueError(f"{missing} must be set in {args.config}: reports are kept there for that model")
    for problem in check_folder("node.state_dir", folder):
        raise ValueError(f"{problem.paths[0]}: {problem.message}: reports could not be kept")
    tokens = Tokenizer.load(path).encode(args.text.read_text("utf-8", errors="replace"))
    prompts = prompts_of(tokens, args.prompts, args.prompt_tokens)
    runner = load_runner(config)
    needed, limit = args.prompt_tokens + TEXT_TOKENS, runner.facts.max_context
    if needed > limit:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} and {TEXT_TOKENS} to compare on are {needed} tokens, the model takes"
            f" {limit}"
        )
    for codec in args.codec:
        one = Check(runner, codec, config.engine.segment_bytes, config.engine.num_chunk_tokens)
        for n, prompt in enumerate(prompts, 1):
            one.prompt(prompt, args.prompt_tokens)
            sys.stderr.write(f"{codec}: prompt {n} of {len(prompts)}\n")
        yield one.report(args.text.name, len(prompts))


def answer_of(config: DecodeConfig, report: CodecReport) -> dict[str, Any]:
    """A report as it is printed: with where it was stored, and whether decoded takes the codec with it."""
    folder, bar = config.node.state_dir, config.codec.min_agreement
    path = None
    if folder is not None:
        try:
            path = str(store(folder, report))
        except OSError as e:
            sys.stderr.write(f"{PROG}: node.state_dir: the report of {report.codec} was not kept: {e}\n")
    return {
        **asdict(report),
        "is_lossy": report.codec in LOSSY,
        "min_agreement": bar,
        "passes": report.top1_agreement >= bar,
        "path": path,
    }


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 (got {text!r})")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--codec", action="append", choices=[c for c in CODECS if c != "raw"])
    parser.add_argument("--prompts", type=_at_least_one, default=NUM_PROMPTS)
    parser.add_argument("--prompt-tokens", type=_at_least_one, default=PROMPT_TOKENS)
    return parser


def main() -> int:
    """Exit code 0, or 1 with the reason on standard error; the reports there are by then are printed all the same."""
    args = _parser().parse_args()
    args.codec = list(dict.fromkeys(args.codec or LOSSY))
    answers: list[dict[str, Any]] = []
    code = EXIT_OK
    try:
        config = load_file(args.config, DecodeConfig, environment="never")
        for report in check(config, args):
            answers.append(answer_of(config, report))
    except ConfigError as e:
        report_problems(PROG, args.config, e)
        code = EXIT_RUNTIME
    except (ValueError, OSError, PdError, RuntimeError, MemoryError) as e:  # RuntimeError: torch has no memory
        sys.stderr.write(f"{PROG}: {e or type(e).__name__}\n")
        code = EXIT_RUNTIME
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if answers:
        sys.stdout.write(json.dumps(answers) + "\n")
    return code if all(a["path"] for a in answers) else code or EXIT_RUNTIME


if __name__ == "__main__":
    sys.exit(main())
