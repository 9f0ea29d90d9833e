"""What a lossy codec does to this model's answers, as `decodectl codec check` found it; whether that is good enough.

Reports lie in the state directory, one for each codec and identity. Knows files, no engine and no network. The
configuration's checks ask `obstacle`, with what is known without loading the model; the daemon `require`, with all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

from common.errors import StartupError
from common.layout import ModelInfo
from common.state_file import write_json
from common.wire.lossy import GROUP_CHANNELS, GROUP_TOKENS

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
    return {"weights_digest": info.weights_digest, "layout_digest": info.layout.digest, **numerics}


def report_path(folder: Path, codec: str, identity: dict[str, str]) -> Path:
    """Where the report of a codec lies."""
    key = sha256(json.dumps([PARAMETERS, identity], sort_keys=True).encode()).hexdigest()
    return folder / f"codec-{codec}-{key[:16]}.json"


def store(folder: Path, report: CodecReport) -> Path:
    """Write it, whole or not at all; the folder is made. Raises OSError."""
    return write_json(report_path(folder, report.codec, report.identity), asdict(report))


def read(path: Path) -> CodecReport | None:
    """The report in a file; None when there is none. Raises StartupError for a damaged one."""
    try:
        data: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        raise StartupError(f"{path} is not a report of `decodectl codec check`: {e}") from e
    if not isinstance(data, dict) or data.keys() != {f.name for f in fields(CodecReport)}:
        raise StartupError(f"{path} is not a report of `decodectl codec check`: it has not its fields")
    for name, value in data.items():
        if not _can_be(name, value):
            raise StartupError(f"{path} is not a report of `decodectl codec check`: {name} is {value!r:.80}")
    return CodecReport(**data)


def _can_be(name: str, value: object) -> bool:
    """A damaged report must not let a codec in: NaN, for one, is below nothing."""
    if name in ("codec", "parameters", "text"):
        return isinstance(value, str)
    if name == "identity":
        return isinstance(value, dict)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Divergences of nothing may be a little below 0.
    return -0.01 <= value <= (1.0 if name in ("top1_agreement", "greedy_agreement") else inf)


def obstacle(folder: Path | None, codec: str, known: Mapping[str, str], min_agreement: float) -> str:
    """Why a lossy codec cannot be used, as far as it shows before the model is loaded; "" when it does not.

    Args:
        known: what is known of the identity so far; the digest of the layout is not.
    """
    if folder is None:
        return (
            f"{codec!r} is lossy and needs a report, which is kept in node.state_dir: set that, then {_advice(codec)}"
        )
    found, damage = [], ""
    for path in sorted(folder.glob(f"codec-{codec}-*.json")):
        try:
            report = read(path)
        except StartupError as e:
            damage = f"; {e}"
            continue
        if report is not None and _is_about(report, codec) and known.items() <= report.identity.items():
            found.append((report.top1_agreement, path))
    if not found:
        about = f"this model as it is served (no such report in {folder}{damage})"
        return f"{codec!r} is lossy and was not checked with {about}: {_advice(codec)}"
    best, path = max(found)
    return "" if best >= min_agreement else f"{codec!r}: {_below(best, path, min_agreement)}"


def require(folder: Path | None, codec: str, info: ModelInfo, min_agreement: float) -> CodecReport:
    """The report that allows a lossy codec for this model.

    Raises:
        StartupError: there is none, or its agreement is below `min_agreement`.
    """
    identity = identity_of(info)
    if folder is None:
        raise StartupError(f"stream.codec: {obstacle(None, codec, identity, min_agreement)}")
    path = report_path(folder, codec, identity)
    report = read(path)
    if report is None or report.identity != identity or not _is_about(report, codec):
        raise StartupError(
            f"stream.codec = {codec!r} is lossy and was not checked with this model as it is served"
            f" (no report {path}): {_advice(codec)}"
        )
    if report.top1_agreement < min_agreement:
        raise StartupError(f"stream.codec = {codec!r}: {_below(report.top1_agreement, path, min_agreement)}")
    return report


def _is_about(report: CodecReport, codec: str) -> bool:
    return report.codec == codec and report.parameters == PARAMETERS


def _advice(codec: str) -> str:
    command = f"decodectl codec check --config FILE --text FILE --codec {codec}"
    return f"run `{command}`, or set stream.codec to a lossless one"


def _below(agreement: float, path: Path, min_agreement: float) -> str:
    return (
        f"the same token is most likely at {agreement:.4f} of the positions checked ({path}), below codec.min_agreement"
        f" = {min_agreement:g}"
    )
