"""`decodectl codec`"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from common.ctl import Context, Verb
from common.ctl_render import table
from common.errors import EXIT_OK
from common.wire.lossy import LOSSY

TEXT = """\
Send the state of real text through a codec and compare what the model says after it, at every position of the text
that follows (teacher-forced) and greedily. The report goes to node.state_dir, which is made if it does not exist;
decoded looks for it there when stream.codec is a lossy one. Loads the model in a process of its own; no running
daemon is needed.

columns:
  of_raw, of_bf16           encoded bytes over the raw ones, and over those of as many bfloat16 values
  encode_MB/s, decode_MB/s  raw megabytes (10^6) per second, one thread
  top1                      part of the positions at which the same token is most likely with and without the codec:
                            what codec.min_agreement is compared with
  greedy                    part of the tokens of greedy continuations before the first that differs
  ppl, ppl_raw              perplexity of the text with and without the codec
  kl_mean, kl_max           Kullback-Leibler divergence of the distributions with and without it, in nats: over all
                            positions, and at the worst
  tokens                    positions compared
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    raw = argparse.RawDescriptionHelpFormatter
    add = actions.add_parser("check", help="compare answers with and without", description=TEXT, formatter_class=raw)
    add.add_argument("--config", required=True, metavar="FILE", help="decoded's: model, engine, node.state_dir")
    add.add_argument("--text", required=True, metavar="FILE", help="text as your users send it, the longer the better")
    codecs = ("zstd", *LOSSY)
    add.add_argument("--codec", action="append", choices=codecs, help="may stand more than once (default: q8 and q4)")
    add.add_argument("--prompts", type=int, default=8, metavar="N", help="stretches of the text (8)")
    add.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="of each, 128 more to compare (1024)")
    add.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the reports as JSON")


def _run(context: Context) -> int:
    args = context.args
    options = ["--config", args.config, "--text", args.text, "--prompts", str(args.prompts)]
    options += ["--prompt-tokens", str(args.prompt_tokens)]
    options += [word for codec in args.codec or () for word in ("--codec", codec)]
    done = subprocess.run([sys.executable, "-m", "decoded.codec_check", *options], stdout=subprocess.PIPE, check=False)
    if done.stdout:
        # Also when a later codec failed: what was found before took minutes.
        reports: list[dict[str, Any]] = json.loads(done.stdout)
        context.show(reports, reports_text(reports))
    return done.returncode if done.returncode >= EXIT_OK else 128 - done.returncode


def reports_text(reports: list[dict[str, Any]]) -> str:
    """One line per codec, then what each report allows and where it lies."""
    rows = []
    for r in reports:
        row = {"codec": r["codec"], "of_raw": f"{r['ratio']:.3f}", "of_bf16": f"{r['ratio_bf16']:.3f}"}
        row |= {"encode_MB/s": f"{r['encode_mb_s']:.0f}", "decode_MB/s": f"{r['decode_mb_s']:.0f}"}
        row |= {"top1": f"{r['top1_agreement']:.4f}", "greedy": f"{r['greedy_agreement']:.3f}"}
        row |= {"ppl": f"{r['perplexity']:.3f}", "ppl_raw": f"{r['perplexity_raw']:.3f}"}
        row |= {"kl_mean": f"{r['kl_mean']:.2e}", "kl_max": f"{r['kl_max']:.2e}", "tokens": str(r["num_tokens"])}
        rows.append(row)
    return "\n".join([table(rows), "", *map(_verdict, reports)])


def _verdict(report: dict[str, Any]) -> str:
    bar, agreement, codec = report["min_agreement"], report["top1_agreement"], report["codec"]
    if not report["is_lossy"]:
        text = "lossless, may be used without a report"
    elif report["passes"]:
        text = f"passes: top1 {agreement:.4f} is not below codec.min_agreement = {bar:g}"
    else:
        text = f"does not pass: top1 {agreement:.4f} is below codec.min_agreement = {bar:g}"
    return f"{codec}: {text}; " + (f"report in {report['path']}" if report["path"] else "the report was not kept")


VERB = Verb(
    "codec",
    "what a codec does to answers",
    "Check codecs with the model, without a daemon.",
    _run,
    _arguments,
    False,
)
