"""What a lossy codec does to this model's answers, as `decodectl codec check` found it; whether that is good enough.

Reports lie in the state directory, one for each codec and identity. Knows files, no engine and no network.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from common.errors import StartupError
from common.layout import ModelInfo
from common.wire.quantise import GROUP_CHANNELS, GROUP_TOKENS

PARAMETERS = f"1: groups of {GROUP_TOKENS} tokens, {GROUP_CHANNELS} channels"
"""Of the codecs; a report made with others says nothing about these."""


@dataclass(frozen=True, slots=True)
class CodecReport:
    """One check.

    Attributes:
        identity: digests of what the state depends on.
        num_tokens: positions compared; `num_prompts` states were sent through the codec.
        ratio, ratio_bf16: encoded bytes over raw ones, and over those of as many bfloat16 values.
        encode_mb_s, decode_mb_s: raw megabytes per second, one thread.
        top1_agreement: part of the positions of the text at which the most likely token is the same.
        greedy_agreement: part of greedily generated tokens until the first that differs.
        perplexity_raw, perplexity: of the text.
        kl_mean, kl_max: Kullback-Leibler divergence of the codec's distribution from the raw one's, in nats.
    """

    codec: str
    parameters: str
    identity: dict[str, str]
    text: str
    num_prompts: int
    num_tokens: int
    ratio: float
    ratio_bf16: float
    encode_mb_s: float
    decode_mb_s: float
    top1_agreement: float
    greedy_agreement: float
    perplexity_raw: float
    perplexity: float
    kl_mean: float
    kl_max: float


def identity_of(info: ModelInfo) -> dict[str, str]:
    """What a report is about: the weights and how their state is kept and computed."""
    numerics = {key: info.numerics.get(key, "") for key in ("dtype", "kv_dtype", "weights")}
    return {"weights": info.weights_digest, "layout": info.layout.digest, **numerics}


def report_path(folder: Path, codec: str, identity: dict[str, str]) -> Path:
    """Where the report of a codec lies."""
    key = sha256(json.dumps([PARAMETERS, identity], sort_keys=True).encode()).hexdigest()
    return folder / f"codec-{codec}-{key[:16]}.json"


def store(folder: Path, report: CodecReport) -> Path:
    """Write it, whole or not at all."""
    path = report_path(folder, report.codec, report.identity)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(report), indent=1) + "\n")
    part.replace(path)
    return path


def read(path: Path) -> CodecReport | None:
    """The report in a file; None when there is none. Raises StartupError for a damaged one."""
    try:
        data: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise StartupError(f"{path} is not a report of `decodectl codec check`: {e}") from e
    names = {f.name for f in fields(CodecReport)}
    if not isinstance(data, dict) or data.keys() != names or not isinstance(data["top1_agreement"], float):
        raise StartupError(f"{path} is not a report of `decodectl codec check`: it has not its fields")
    return CodecReport(**data)


def require(folder: Path | None, codec: str, info: ModelInfo, min_agreement: float) -> CodecReport:
    """The report that allows a lossy codec for this model.

    Raises:
        StartupError: there is none, or its agreement is below `min_agreement`.
    """
    advice = f"run `decodectl codec check --codec {codec} --text FILE`, or set stream.codec to a lossless one"
    if folder is None:
        raise StartupError(f"stream.codec = {codec!r} is lossy and needs a report in node.state_dir, which is not set")
    identity = identity_of(info)
    path = report_path(folder, codec, identity)
    report = read(path)
    if report is None or report.identity != identity or report.parameters != PARAMETERS or report.codec != codec:
        raise StartupError(
            f"stream.codec = {codec!r} is lossy and was not checked with this model as it is served"
            f" (no report {path}): {advice}"
        )
    if report.top1_agreement < min_agreement:
        raise StartupError(
            f"stream.codec = {codec!r}: the same token is most likely at {report.top1_agreement:.4f} of the positions"
            f" checked ({path}), below codec.min_agreement = {min_agreement:g}"
        )
    return report
