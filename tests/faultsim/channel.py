"""What stands for TLS on simulated control links: records with a checksum, and a certificate once both ends spoke.

The real TlsChannel draws random numbers that no seed governs. What it promises is kept: nothing that was altered, cut
or moved comes out, and nothing is said in the clear. Sealed data links are the product's own.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from common.errors import TlsFailed
from common.net.tls import CertificateFacts

_RECORD = struct.Struct(">3sHII")
_BEGIN, _MOST = b"\x16\x03\x03", 16384


class SimChannel:
    """One end (the interface of TlsChannel)."""

    def __init__(self, _end: Any, peer_name: str | None) -> None:
        self.certificate: CertificateFacts | None = None
        self._is_server = peer_name is None
        self._in, self._clear, self._out = bytearray(), bytearray(), bytearray()
        self._num_in = self._num_out = 0
        self._waiting: list[bytes] = []
        if not self._is_server:
            self._record(b"hello")

    def receive(self, data: bytes | memoryview) -> None:
        self._in += data
        while len(self._in) >= _RECORD.size:
            begin, size, number, check = _RECORD.unpack_from(self._in)
            if begin != _BEGIN or size > _MOST:
                raise TlsFailed("TLS: a record was damaged", "failed")
            if len(self._in) < _RECORD.size + size:
                return
            body = bytes(self._in[_RECORD.size : _RECORD.size + size])
            del self._in[: _RECORD.size + size]
            if number != self._num_in or check != zlib.crc32(body, number):
                raise TlsFailed("TLS: a record was damaged", "failed")
            self._num_in += 1
            if self.certificate is None:
                self._verified()
            else:
                self._clear += body

    def read_into(self, buffer: memoryview) -> int:
        num = min(len(buffer), len(self._clear))
        buffer[:num] = self._clear[:num]
        del self._clear[:num]
        return num

    def write(self, data: bytes | memoryview) -> None:
        if self.certificate is None:
            self._waiting.append(bytes(data))
            return
        for at in range(0, len(data), _MOST):
            self._record(bytes(data[at : at + _MOST]))

    def take_output(self) -> bytes:
        out, self._out = bytes(self._out), bytearray()
        return out

    def _verified(self) -> None:
        self.certificate = CertificateFacts(("sim",), 1e12)
        if self._is_server:
            self._record(b"hello")
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.write(data)

    def _record(self, body: bytes) -> None:
        check = zlib.crc32(body, self._num_out)
        self._out += _RECORD.pack(_BEGIN, len(body), self._num_out, check) + body
        self._num_out += 1
