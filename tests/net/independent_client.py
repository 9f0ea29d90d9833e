"""A client written from docs/protocol.md alone, to show that the document suffices: nothing of the product is imported.

Blocking sockets, modes "none" and "key", codecs "raw" and "zstd", one prefill at a time, no TLS and no resume. Pings
are answered while a prefill runs only. Whatever does not add up, a refusal too, is a ValueError.
"""

import hashlib
import hmac
import os
import select
import socket
import struct
import zlib

import msgpack
import xxhash
import zstandard

HELLO, AUTH, HELLO_ACK, PING, PONG, ERROR = range(1, 7)
PREFILL, ACCEPTED, REFUSED, STARTED, PROGRESS, PIECE, COMPLETE, ACK, CREDIT = range(16, 25)
RESUMED, MAX_PIECE, MAX_SEGMENT = 27, 1 << 16, 1 << 20


def expect(truth, what):
    if not truth:
        raise ValueError(what)


def needed(kind, window, start, stop):
    return range({"window": max(start, stop - window + 1), "recurrent": stop - 1}.get(kind, start), stop)


def decode_zstd(data):
    raw, at = b"", 0
    while at < len(data):
        size, kind = struct.unpack_from(">IB", data, at)
        width = kind & 127
        block, body = bytearray(size), at + 5 + 5 * width
        for p, (method, length) in enumerate(struct.iter_unpack(">BI", data[at + 5 : body])):
            plane, body = data[body : body + length], body + length
            columns = 2 + int.from_bytes(plane[:2], "big") if method == 2 else 0
            found = zstandard.decompress(plane[columns:]) if method else plane  # no other size fits
            if method == 2:
                found = bytes((b + plane[2 + i % (columns - 2)]) & 255 for i, b in enumerate(found))
            block[p::width] = found
        if kind & 128:
            for i in range(0, size, width):
                turned = int.from_bytes(block[i : i + width], "little")
                block[i : i + width] = (turned >> 1 | (turned & 1) << 8 * width - 1).to_bytes(width, "little")
        raw, at = raw + block, body
    return raw


class Link:
    def __init__(self, address, number, session, mode, key):
        self.sock, self.max_header = socket.create_connection(address), 512
        ids = [hmac.digest(key, b"prfaas key id 1", "sha256")[:8]] if mode == "key" and number == 0 else []
        same = {"session": session, "link": number, "mode": mode, "keys": ids}
        ours = self.send(HELLO, role="decode", nonce=os.urandom(32), **same)
        hello, theirs = self.receive(HELLO)[2:]
        expect({**hello, "nonce": 0} == {"role": "prefill", "nonce": 0, **same}, f"another Hello: {hello}")
        said = b"".join([session, *(struct.pack(">H", len(frame)) + frame for frame in (ours, theirs))])
        place = struct.pack(">xI", number) + said
        self.send(AUTH, mac=hmac.digest(key, b"prfaas auth 1\0decode" + place, "sha256"))
        proof = hmac.digest(key, b"prfaas auth 1\0prefill" + place, "sha256")
        expect(hmac.compare_digest(self.receive(AUTH)[2]["mac"], proof), "the server's proof is wrong")
        self.session_key, self.max_header = hmac.digest(key, b"prfaas session 1\0" + said, "sha256"), 16384

    def send(self, kind, stream=0, payload=b"", **fields):
        header = msgpack.packb(fields)
        head = struct.pack(">2sBBHHIII", b"PF", 6, kind, 0, len(header), stream, len(payload), zlib.crc32(header))
        frame = head + struct.pack(">I", zlib.crc32(head)) + header + payload
        self.sock.sendall(frame)
        return frame

    def receive(self, *wanted):
        """Type, stream, fields, and the bytes of the frame: of a Piece the payload alone."""
        head = self._read(24)
        *fixed, kind, flags, length, stream, size, check = struct.unpack(">2sBBHHIII", head[:20])
        expect(zlib.crc32(head[:20]) == int.from_bytes(head[20:], "big"), "head check")
        is_small = length <= self.max_header and size <= (MAX_PIECE if kind == PIECE else 0)
        expect((*fixed, flags) == (b"PF", 6, 0) and is_small, f"fixed header {head}")
        header = self._read(length)
        expect(zlib.crc32(header) == check, "header check")
        fields = msgpack.unpackb(header)
        expect(kind in wanted or (not wanted and kind not in (ERROR, REFUSED)), f"type {kind}: {fields}")
        return kind, stream, fields, self._read(size) if kind == PIECE else head + header

    def _read(self, size):
        data = self.sock.recv(size, socket.MSG_WAITALL)
        expect(len(data) == size, "the link was closed")
        return data


class Client:
    """All links of one session, open. `layout` has for each layer: kind, window, [bytes of a row of a tensor]."""

    def __init__(self, address, layout, key=None, data_links=2):
        session, mode = os.urandom(16), "none" if key is None else "key"
        self.control = Link(address, 0, session, mode, key or bytes(32))
        self.layout, self.stream, self.server = layout, 0, self.control.receive(HELLO_ACK)[2]
        ours = {"name": "independent", "instance": session.hex(), "codecs": ["zstd", "raw"], "secret": None}
        ours |= {"max_piece_bytes": MAX_PIECE, "max_segment_bytes": MAX_SEGMENT, "max_streams": 1}
        self.control.send(HELLO_ACK, **{**self.server, **ours})
        self.control.send(RESUMED)
        data = [Link(address, number + 1, session, mode, self.control.session_key) for number in range(data_links)]
        self.links = {link.sock: link for link in (self.control, *data)}

    def close(self):
        for sock in self.links:
            sock.close()

    def prefill(self, request_id, tokens, start=0, codecs=("zstd", "raw")):
        """What [start, len(tokens)) needs: for each layer, for each of its tensors, the bytes of its rows."""
        self.stream, self.limit, stop = self.stream + 1, MAX_SEGMENT, len(tokens)
        payload, texts = struct.pack(f"<{stop}I", *tokens), [text.encode() for text in (request_id, "", *codecs)]
        said = struct.pack(">IIhBIBdBdH", start, stop, 0, 0, 0, 0, 0.0, 0, 0.0, len(texts))
        said += b"".join(struct.pack(">H", len(text)) + text for text in texts) + payload
        self.digests, self.segments, self.landed = [hashlib.blake2b(said, digest_size=16).digest()], {}, {}
        self.unclaimed = [set(needed(kind, window, start, stop)) for kind, window, _ in self.layout]
        self.rows = [[{} for _ in sizes] for _, _, sizes in self.layout]  # by their start
        asked = {"request_id": request_id, "start": start, "num_tokens": stop, "deadline_s": None, "priority": 0}
        asked |= {
            "salt": b"",
            "codecs": codecs,
            "limit": self.limit,
            "token_hash": self.digests[0],
            "pushes": False,
            "held": 0,
            "due_s": None,
        }
        self.control.send(PREFILL, self.stream, payload, **asked)
        self._receive_all(stop)
        self.control.send(ACK, self.stream, segments=[], limit=self.limit, is_final=True)
        return [[b"".join(rows[at] for at in sorted(rows)) for rows in tensors] for tensors in self.rows]

    def _receive_all(self, stop):
        told = {ACCEPTED: [], PROGRESS: [], COMPLETE: []}
        while not told[COMPLETE] or len(self.digests) <= told[COMPLETE][0]["num_segments"]:
            ready = select.select(self.links, [], [], 2.5 * self.server["heartbeat_s"])[0]
            expect(ready, "nothing was said for 2.5 heartbeats")
            for link in map(self.links.get, ready):
                kind, stream, fields, payload = link.receive()
                if kind == PING:
                    link.send(PONG, no=fields["no"])
                elif kind == PIECE and stream == self.stream:
                    self._take(fields, payload)
                elif kind in told and stream == self.stream:
                    told[kind].append(fields)
        for said in told[PROGRESS] + told[COMPLETE]:
            expect(self.digests[said["num_segments"] :][:1] == [said["digest"]], f"running digest of {said}")
        what = {"num_tokens": stop, "num_segments": len(self.segments), "encoded": self.limit - MAX_SEGMENT}
        expect(what.items() <= told[COMPLETE][0].items() and not any(self.unclaimed), f"{told[COMPLETE]}, not {what}")
        expect([said["token_hash"] for said in told[ACCEPTED]] == self.digests[:1], f"accepted: {told[ACCEPTED]}")

    def _take(self, segment, payload):
        offset, size, piece = segment.pop("offset"), segment["encoded"], segment["piece"]
        if segment["no"] not in self.segments:
            expect(segment["at"] + size <= self.limit and size <= MAX_SEGMENT, f"{segment} is beyond {self.limit}")
            for n in segment["layers"]:
                rows = set(range(segment["start"], segment["stop"]))
                expect(rows and rows <= self.unclaimed[n], f"rows of layer {n} in {segment}")
                self.unclaimed[n] -= rows
            self.segments[segment["no"]] = segment, bytearray(size), set(range(0, size, piece)) or {0}
        known, data, missing = self.segments[segment["no"]]
        expect(segment == known and len(payload) == min(piece, size - offset), f"{segment} at {offset}, not {known}")
        if offset in missing:  # else it is a second copy
            data[offset : offset + len(payload)] = payload
            missing.remove(offset)
            if not missing:
                self._land(segment, bytes(data))

    def _land(self, segment, data):
        no, start, num_rows = segment["no"], segment["start"], segment["stop"] - segment["start"]
        expect(xxhash.xxh3_128_digest(data) == segment["digest"], f"digest of segment {no}")
        data = decode_zstd(data) if segment["codec"] == "zstd" else data
        for n in segment["layers"]:
            for rows, size in zip(self.rows[n], self.layout[n][2], strict=True):
                rows[start], data = data[: num_rows * size], data[num_rows * size :]
                expect(len(rows[start]) == num_rows * size, f"segment {no} is short")
        expect(not data, f"segment {no} is long")
        self.landed[no], self.limit = segment, self.limit + segment["encoded"]
        self.control.send(CREDIT, self.stream, limit=self.limit)  # the Ack says it again
        self.control.send(ACK, self.stream, segments=[no], limit=self.limit, is_final=False)
        while s := self.landed.get(len(self.digests) - 1):
            said = struct.pack(">IIIQQ", *(s[name] for name in ("no", "start", "stop", "raw", "encoded"))) + s["digest"]
            said += struct.pack(f">I{len(s['layers'])}IH", len(s["layers"]), *s["layers"], len(s["codec"]))
            said += s["codec"].encode()
            self.digests.append(hashlib.blake2b(self.digests[-1] + said, digest_size=16).digest())
