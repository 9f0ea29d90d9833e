"""Recall of the tiny hybrid model on fresh texts: in this process, or through decoded's HTTP API.

    python -m benchmarks.tiny_hybrid.evaluate --url http://127.0.0.1:8000 [--route remote] [--json]
    python -m benchmarks.tiny_hybrid.evaluate --model DIR [--ablate]

Recall is the share of values that are right, over all sixteen of each answer; `answers` is a digest of every word that
was said, equal when two runs said the same. `--ablate` spoils one kind of state at a chunk boundary just before the
question and measures again: what falls shows which state the answers come from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cli import make_parser
from benchmarks.cluster import prfaas_home
from benchmarks.tiny_hybrid import task

LENGTHS = (256, 512, 1024, 1536, 2048)
BUCKETS = (256, 512, 1024, 1536, 2048)
EVALUATION_SEED = 1_000_003  # no training seed
Answerer = Callable[[list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in words, the answer in words, and how far back each value of it was said."""

    prompt: list[str]
    answer: list[str]
    distances: list[int]


@dataclass
class Score:
    """Right values of all values, in total and by distance; whole answers that are right to the last word; a digest of
    all words of all answers.
    """

    right: int = 0
    total: int = 0
    whole: int = 0
    answers: int = 0
    by_distance: dict[int, list[int]] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)
    said: Any = field(default_factory=hashlib.sha256, repr=False)

    @property
    def recall(self) -> float:
        return self.right / self.total if self.total else 0.0

    def add(self, question: Question, words: Sequence[str]) -> None:
        """Count one answer; words that are missing are wrong."""
        self.said.update(" ".join([*question.prompt[-1:], *(w for w in words if w != task.END), "\n"]).encode())
        values = list(words[::2]) + [""] * task.NUM_NAMES
        for expected, got, distance in zip(question.answer[::2], values, question.distances, strict=False):
            bucket = self.by_distance.setdefault(next(b for b in (*BUCKETS, 1 << 30) if distance <= b), [0, 0])
            bucket[0] += expected == got
            bucket[1] += 1
            self.right += expected == got
            self.total += 1
        self.answers += 1
        self.whole += list(words[: task.ANSWER_WORDS - 1]) == question.answer[:-1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON and for people."""
        near = {("more" if b >= 1 << 30 else f"<={b}"): hits / n for b, (hits, n) in sorted(self.by_distance.items())}
        return {
            "recall": self.recall,
            "values": self.total,
            "whole_answers": self.whole / max(1, self.answers),
            "answers": self.said.hexdigest()[:12],
            "by_distance": near,
            "routes": self.routes,
        }


def questions(num_words: int, count: int, seed: int = EVALUATION_SEED) -> list[Question]:
    """`count` questions about texts of this many words; the same ones for the same seed."""
    rng = random.Random(f"{seed}/{num_words}")
    found = []
    for _ in range(count):
        text, first = task.make_text(rng, task.shape_for(num_words)), rng.randrange(task.NUM_NAMES)
        found.append(Question(text.question(first), text.answer(first), text.distances(first)))
    return found


def measure(asked: Sequence[Question], answer: Answerer) -> Score:
    """Ask all questions one after another."""
    score = Score()
    for question in asked:
        score.add(question, answer(question.prompt))
    return score


class HttpAnswerer:
    """Asks decoded. `route` ("local" or "remote") needs http.allow_route_override; `routes` counts those taken."""

    def __init__(self, url: str, route: str = "", api_key: str = "", model: str = "tiny-hybrid") -> None:
        self._url = url.rstrip("/") + "/v1/completions"
        self._headers = {"Content-Type": "application/json", "X-Prfaas-Timing": "1"}
        self._headers |= {"X-Prfaas-Route": route} if route else {}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self.routes: dict[str, int] = {}

    def __call__(self, prompt: list[str]) -> list[str]:
        """The words of the answer. Raises RuntimeError with the server's message when it refuses."""
        body = {"model": self._model, "prompt": " ".join(prompt), "temperature": 0, "max_tokens": task.ANSWER_WORDS}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self._url}: {error.code} {error.read().decode(errors='replace')[:300]}") from error
        route = answer.get("prfaas", {}).get("route", "unknown")
        self.routes[route] = self.routes.get(route, 0) + 1
        return str(answer["choices"][0]["text"]).split()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 when recall is below --at-least."""
    parser = make_parser("python -m benchmarks.tiny_hybrid.evaluate", __doc__)
    parser.add_argument("--url", help="base URL of decoded; without it the model runs in this process")
    parser.add_argument(
        "--route",
        choices=("local", "remote"),
        default="",
        help="with --url: the route to ask for (default: decoded's own choice)",
    )
    parser.add_argument("--api-key", default="", help="with --url: the key to send")
    parser.add_argument("--model", type=Path, default=prfaas_home() / "models" / "tiny-hybrid", help="model directory")
    parser.add_argument("--ablate", action="store_true", help="also measure with spoilt state (in this process only)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="words of the prompts")
    parser.add_argument("--count", type=int, default=8, help="prompts of each length, 16 values each")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="of the prompts")
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.0,
        help="exit with 1 when the recall of any length is below this share, 0 to 1",
    )
    parser.add_argument("--json", action="store_true", help="print all results as JSON at the end")
    args = parser.parse_args(argv)
    results = _measure_http(args) if args.url else _measure_here(args)
    if args.json:
        sys.stdout.write(json.dumps(results) + "\n")
    return int(any(r["recall"] < args.at_least for r in results if r["spoilt"] == "nothing"))


def _measure_http(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for length in args.lengths:
        answer = HttpAnswerer(args.url, args.route, args.api_key)
        score = measure(questions(length, args.count, args.seed), answer)
        score.routes = answer.routes
        results.append(_show(length, "nothing", score, args.json))
    return results


def _measure_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.tiny_hybrid.inprocess import SPOILERS, LocalAnswerer

    results = []
    for length in args.lengths:
        asked = questions(length, args.count, args.seed)
        for spoilt in SPOILERS if args.ablate else ("nothing",):
            score = measure(asked, LocalAnswerer(args.model, spoilt))
            results.append(_show(length, spoilt, score, args.json))
    return results


def _show(length: int, spoilt: str, score: Score, is_quiet: bool) -> dict[str, Any]:
    result = {"words": length, "spoilt": spoilt, **score.as_dict()}
    if not is_quiet:
        near = "  ".join(f"{name} {value:.3f}" for name, value in result["by_distance"].items())
        more = "".join(f"  {route} {n}" for route, n in score.routes.items())
        what = "" if spoilt == "nothing" else f"  spoilt: {spoilt}"
        facts = f"recall {score.recall:.3f} of {score.total}  {near}  answers {result['answers']}"
        sys.stdout.write(f"{length:5d} words  {facts}{more}{what}\n")
        sys.stdout.flush()
    return result


if __name__ == "__main__":
    sys.exit(main())
