"""`decodectl codec`"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from common.ctl import Context, Verb
from common.ctl_render import table


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    text = (
        "Send the state of real text through a codec and compare what the model says after it: whether the same\n"
        "token is most likely (teacher-forced, at every position of the text that follows), greedy continuation,\n"
        "perplexity, Kullback-Leibler divergence; and bytes and speed. The report goes to node.state_dir, where\n"
        "decoded looks for it when stream.codec is a lossy one. Loads the model in a process of its own; no running\n"
        "daemon is needed."
    )
    raw = argparse.RawDescriptionHelpFormatter
    add = actions.add_parser("check", help="compare answers with and without", description=text, formatter_class=raw)
    add.add_argument("--config", required=True, metavar="FILE", help="decoded's: model, engine, node.state_dir")
    add.add_argument("--text", required=True, metavar="FILE", help="text as your users send it, the longer the better")
    add.add_argument("--codec", action="append", metavar="CODEC", help="zstd, q8 or q4, more than once (q8 and q4)")
    add.add_argument("--prompts", type=int, default=8, metavar="N", help="stretches of the text (8)")
    add.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of each, 128 more to compare (1024)")
    add.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the reports as JSON")


def _run(context: Context) -> int:
    args = context.args
    options = ["--config", args.config, "--text", args.text, "--prompts", str(args.prompts)]
    options += ["--prompt-tokens", str(args.prompt_tokens)]
    options += [word for codec in args.codec or () for word in ("--codec", codec)]
    done = subprocess.run([sys.executable, "-m", "decoded.codec_check", *options], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return done.returncode if done.returncode > 0 else 128 - done.returncode
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return context.show(reports, reports_text(reports))


def reports_text(reports: list[dict[str, Any]]) -> str:
    """One line per codec."""
    rows = []
    for r in reports:
        row = {"codec": r["codec"], "of_raw": f"{r['ratio']:.3f}", "of_bf16": f"{r['ratio_bf16']:.3f}"}
        row |= {"encode_MB_s": f"{r['encode_mb_s']:.0f}", "decode_MB_s": f"{r['decode_mb_s']:.0f}"}
        row |= {"top1": f"{r['top1_agreement']:.4f}", "greedy": f"{r['greedy_agreement']:.3f}"}
        row |= {"ppl": f"{r['perplexity']:.3f}", "ppl_raw": f"{r['perplexity_raw']:.3f}"}
        row |= {"kl_mean": f"{r['kl_mean']:.2e}", "kl_max": f"{r['kl_max']:.2e}", "tokens": str(r["num_tokens"])}
        rows.append(row)
    return table(rows)


VERB = Verb(
    "codec",
    "what a codec does to answers",
    "Check codecs with the model, without a daemon.",
    _run,
    _arguments,
    False,
)
