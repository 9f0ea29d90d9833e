"""`make bench-codecs`: what each codec makes of the state of real models over long text, and of what they then say.

For each model and codec the program behind `decodectl codec check`: the state of prompts through the codec, then the
text's own continuation (teacher forcing) and a greedy one, against the same state as it was. Sizes are against bfloat16
values: lossless coding of bfloat16 state, lossy coding of float32 state. The tiny hybrid reads its own task.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cli import NAMED, make_parser
from benchmarks.cluster import make_cluster, prfaas_home
from benchmarks.text import real_text
from benchmarks.tiny_hybrid import task
from decoded.codec_check import TEXT_TOKENS

CODECS = {"zstd": "bfloat16", "q8": "float32", "q4": "float32"}
MODELS = ("smollm2-135m-instruct", "gemma3-270m", "tiny-hybrid")
TITLES = {
    "ratio_bf16": "bytes / bf16",
    "ratio": "bytes / raw",
    "encode_mb_s": "encode MB/s",
    "decode_mb_s": "decode MB/s",
    "top1_agreement": "top-1",
    "greedy_agreement": "greedy",
    "perplexity_raw": "perplexity raw",
    "perplexity": "perplexity",
    "kl_mean": "KL mean",
    "kl_max": "KL max",
}


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    args = _arguments(argv)
    reports = []
    for name in args.models:
        for codec, kv_dtype in CODECS.items():
            if codec in args.codecs:
                reports.append({"model": name, "kv_dtype": kv_dtype, **check(name, codec, kv_dtype, args)})
                print(line(reports[-1]), file=sys.stderr, flush=True)
    args.out.write_text(json.dumps(reports, indent=1))
    print("\n".join(["| model | codec | " + " | ".join(TITLES.values()) + " |", "|---" * (2 + len(TITLES)) + "|"]))
    print("\n".join(map(line, reports)))
    return 0


def check(model: str, codec: str, kv_dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """One report. Raises CalledProcessError with the reason on standard error."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        engine = {"threads": args.threads, "kv_dtype": kv_dtype}
        cluster = make_cluster(
            Path(folder), prfaas_home() / "models" / model, num_prefillds=0, decoded={"engine": engine}
        )
        cluster.decoded.config["node"]["state_dir"] = folder
        text = Path(folder) / "text"
        text.write_text(text_for(model, args))
        command = [sys.executable, "-m", "decoded.codec_check", "--config", str(cluster.decoded.write_config())]
        command += ["--text", str(text), "--codec", codec, "--prompts", str(args.prompts)]
        command += ["--prompt-tokens", str(args.prompt_tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    [report] = json.loads(done.stdout)
    return dict(report)


def text_for(model: str, args: argparse.Namespace) -> str:
    """As much as the prompts need: prose, or for the tiny hybrid questions of its task with their answers."""
    if model != "tiny-hybrid":
        return real_text(min(460_000, args.prompts * (args.prompt_tokens + TEXT_TOKENS) * 5))
    size = args.prompt_tokens + TEXT_TOKENS - 2 - task.ANSWER_WORDS
    texts = [task.make_text(random.Random(n), task.shape_for(size)) for n in range(args.prompts)]
    return " ".join(" ".join([*text.question(0), *text.answer(0)]) for text in texts)


def line(report: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [f"{report[key]:.0f}" if "mb_s" in key else f"{report[key]:.4g}" for key in TITLES]
    return f"| {report['model']} | {report['codec']} | " + " | ".join(cells) + " |"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("make bench-codecs ARGS=", __doc__ or "")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help=NAMED)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS), help="which")
    parser.add_argument("--prompts", type=int, default=16, help="stretches of the text")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each")
    parser.add_argument("--threads", type=int, default=2, help="of the engine")
    parser.add_argument("--out", type=Path, default=Path("codecs.json"), help="file to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
