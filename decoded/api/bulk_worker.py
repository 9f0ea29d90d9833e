"""The process that prepares large request bodies for the HTTP API: reads requests from stdin, answers on stdout.

Started by bulk.py with the tokenizer's directory; ends when its stdin does. One request at a time, at lower priority
than the daemon. Knows no HTTP.
"""

from __future__ import annotations

import json
import os
import sys
from typing import BinaryIO

from common.errors import InvalidRequest
from common.text.tokenizer import Tokenizer
from decoded.api.bulk import HEADER, pack_error, pack_prepared
from decoded.api.prepare import prepare
from decoded.api.schema import Limits

_NICE = 5


def serve(tokenizer: Tokenizer, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the stream ends."""
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        num_json, num_raw = HEADER.unpack(header)
        head = json.loads(requests.read(num_json))
        body = requests.read(num_raw)
        raw = b""
        try:
            reply, raw = pack_prepared(prepare(head["kind"], body, Limits(**head["limits"]), tokenizer))
        except InvalidRequest as error:
            reply = pack_error(error)
        text = json.dumps(reply).encode()
        replies.write(HEADER.pack(len(text), len(raw)) + text)
        replies.write(raw)
        replies.flush()


def main() -> None:
    """Entry point: `python -m decoded.api.bulk_worker MODEL_DIR` ("" for the byte tokenizer)."""
    os.nice(_NICE)
    source = sys.argv[1]
    tokenizer = Tokenizer.load(source) if source else Tokenizer.bytes_only()
    serve(tokenizer, sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
