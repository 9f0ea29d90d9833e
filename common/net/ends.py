"""From a LocalEnd and its LinkOptions to what wire/ needs: our HelloAck and the configuration of every connection."""

from __future__ import annotations

from common.net.options import LinkOptions, LocalEnd
from common.wire.codec import CODECS
from common.wire.frames import MIN_PIECE_BYTES
from common.wire.handshake import ConnectionConfig
from common.wire.messages import HelloAck


def hello_ack(local: LocalEnd, options: LinkOptions) -> HelloAck:
    """What this process says about itself."""
    info = local.info
    return HelloAck(
        name=local.name,
        instance=local.instance_id,
        weights=info.weights_digest,
        config=info.config_digest,
        tokenizer=info.tokenizer_digest,
        layout=info.layout.digest,
        block_tokens=local.block_tokens,
        hash_scheme=local.hash_scheme,
        numerics={**info.numerics, **local.numerics},
        codecs=CODECS,
        max_piece_bytes=max(MIN_PIECE_BYTES, options.piece_bytes),
        max_segment_bytes=max(MIN_PIECE_BYTES, options.max_segment_bytes),
        max_prompt_tokens=options.max_prompt_tokens,
        max_streams=options.max_streams,
        heartbeat_s=options.heartbeat_s,
        lease_s=options.lease_s,
    )


def connection_config(local: LocalEnd, options: LinkOptions) -> ConnectionConfig:
    """The same for every link that is made while `local` holds."""
    return ConnectionConfig(
        role=local.role,
        mode=local.security.mode,
        keys=local.security.keys,
        ack=hello_ack(local, options),
        require_same_numerics=local.require_same_numerics,
        handshake_timeout_s=options.connect_timeout_s,
    )
