"""What stands at both sites in a simulated run: nodes, links and caches, built from a deployment.

Decides nothing. Called by cluster.py; beliefs.py looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.policy.costs import StateSize
from common.policy.profile import NodeProfile
from common.sim.caches import BlockCache
from common.sim.links import EvenLink, OrderedLink
from common.sim.loop import Loop
from common.sim.mixing import Mixing
from common.sim.nodes import DecodeNode, PrefillNode, Processor
from common.sim.workload import BLOCK_TOKENS, SimRequest


@dataclass(frozen=True, slots=True)
class Deployment:
    """What stands where.

    Attributes:
        remote, own: profiles of a node of either site; `own` also decodes.
        num_remote, num_prefill, num_decode: N_prfaas, N_p, N_d.
        egress_bps, rtt_s, rate_changes: the path; (instant, bits per second) pairs.
        does_local_prefill: decoding nodes compute prompts too, mixed into decode steps of at most `max_stretch` times
            the length.
        measured_slowdown, measured_stretch: how many times as long local prefill was seen to take in such steps, and
            how many times as long they were; 0: a token takes there what it takes alone.
        cache_tokens: room of the prefix cache of the own and of the remote site.
        max_sharing: prompts that take turns at a node of the own and of the remote site; 1 is one after the other.
        import_s: what taking in state costs decoded's processor for each raw byte, as it arrives: neither prompts nor
            streams get on meanwhile.
        sends_in_order: remote nodes send state by state, as prefilld does; otherwise all states share the path evenly.
        lead_s: what a request takes beside computing, sending and decoding (HTTP, handing over), at either site.
    """

    remote: NodeProfile
    own: NodeProfile
    state: StateSize
    num_remote: int
    num_prefill: int
    num_decode: int
    egress_bps: float = 100e9
    rtt_s: float = 0.0
    rate_changes: tuple[tuple[float, float], ...] = ()
    chunk_tokens: int = 8192
    codec_ratio: float = 1.0
    does_local_prefill: bool = False
    max_stretch: float = 3.0
    measured_slowdown: float = 0.0
    measured_stretch: float = 0.0
    cache_tokens: tuple[float, float] = (0.0, 0.0)
    max_sharing: tuple[int, int] = (1, 1)
    lead_s: tuple[float, float] = (0.0, 0.0)
    import_s: float = 0.0
    sends_in_order: bool = True

    @property
    def mixed_slowdown(self) -> float:
        """How many times as long local prefill takes in stretched steps."""
        return self.measured_slowdown or self.max_stretch / (self.max_stretch - 1)

    @property
    def mixed_token_ratio(self) -> float:
        """How many times as long a token of a prompt takes in a stretched step as in a chunk of its own: a step of S
        seconds, of which 1 / stretch are its rows', gets through what would take S / slowdown alone.
        """
        if not self.measured_slowdown or self.measured_stretch <= 1.0:
            return 1.0
        return self.measured_slowdown * (1.0 - 1.0 / self.measured_stretch)


class Hardware:
    """All of it. `on_done` is called with every request that a decoding node has finished."""

    def __init__(self, deployment: Deployment, on_done: Callable[[SimRequest], None]) -> None:
        """Raises ValueError when prompts, or tokens, could be computed nowhere."""
        self.deployment, self.loop = deployment, Loop()
        d = deployment
        if d.own.decode is None:
            raise ValueError(f"profile {d.own.name!r} does not decode, so it cannot stand at decoded's site")
        if not d.does_local_prefill and not d.num_remote and not d.num_prefill:
            raise ValueError("there is no node that prefills")
        kind = OrderedLink if d.sends_in_order else EvenLink
        self.link = kind(self.loop, d.egress_bps, d.rate_changes)
        self.uplink = EvenLink(self.loop, d.egress_bps, d.rate_changes)
        own, remote = d.max_sharing
        self.remote = [self._node(d.remote, f"remote{n}", remote) for n in range(d.num_remote)]
        self.prefill = [self._node(d.own, f"own{n}", own) for n in range(d.num_prefill)]
        self.decode = [DecodeNode(self.loop, d.own.decode, d.own.max_rows, on_done) for _ in range(d.num_decode)]
        self.mixed = [self._mixed_node(node, f"local{n}") for n, node in enumerate(self.decode) if d.does_local_prefill]
        self.own_cache, self.remote_cache = (BlockCache(tokens, BLOCK_TOKENS) for tokens in d.cache_tokens)
        self.nodes = {node.name: node for node in (*self.remote, *self.prefill, *self.mixed)}

    def _node(self, profile: NodeProfile, name: str, max_sharing: int) -> PrefillNode:
        processor = Processor(self.deployment.chunk_tokens)
        return PrefillNode(self.loop, name, profile.prefill, processor, max_sharing)

    def _mixed_node(self, decode: DecodeNode, name: str) -> PrefillNode:
        """Local prefill: alone at full speed, beside rows in what a stretched step leaves."""
        d = self.deployment
        mixing = Mixing(decode, d.chunk_tokens, d.max_stretch, d.mixed_token_ratio)
        return PrefillNode(self.loop, name, d.own.prefill, mixing, d.max_sharing[0])

    def duty(self, seconds: float) -> dict[str, float]:
        """The part of `seconds` that each stage worked, and the link."""
        d = self.deployment
        rows = sum(node.row_s for node in self.decode)
        out = {"decode": rows / (d.num_decode * d.own.max_rows * seconds)}
        for name, nodes in (("remote_prefill", self.remote), ("own_prefill", self.prefill), ("local", self.mixed)):
            if nodes:
                out[name] = sum(node.busy_s for node in nodes) / (len(nodes) * seconds)
        return out | ({"link": self.link.busy_s / seconds} if self.remote else {})
