"""The queue of one class: fair over tenants, first come first served within each. Operations take O(log tenants).

Start-time fair queueing (Goyal, Vin, Cheng: Start-time Fair Queueing, SIGCOMM 1996, section 2): a request's start tag
is max(virtual time, finish tag of its tenant's last one), its finish tag that plus its cost; the smallest start tag is
served, and is the virtual time from then on. A cost that turns out other than expected is set right afterwards, as the
counters of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024) do. Pure; used by fair.py.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from common.policy.views import Demand


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued demand and what serving it is expected to cost, in tokens."""

    demand: Demand
    cost: float


@dataclass(slots=True, eq=False)
class _Tenant:
    """`tag` is the start tag of its next request. `entry` numbers its one valid entry in either heap."""

    name: str
    tag: float
    entry: int = 0
    cost: float = 0.0
    requests: OrderedDict[str, Waiting] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class TenantQueue:
    """Requests of several tenants. Costs and tags are in tokens. `num_tenants` have requests that wait."""

    now: float = 0.0
    num_requests: int = 0
    num_tenants: int = 0
    cost: float = 0.0
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _ready: list[tuple[float, int, _Tenant]] = field(default_factory=list)
    _idle: list[tuple[float, int, _Tenant]] = field(default_factory=list)
    _num_entries: int = 0

    def push(self, waiting: Waiting) -> None:
        """Queue a request behind the others of its tenant."""
        name = waiting.demand.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self.now)
        was_idle = not tenant.requests
        tenant.requests[waiting.demand.request_id] = waiting
        self._count(tenant, waiting.cost, 1)
        if was_idle:
            self.num_tenants += 1
            tenant.tag = max(tenant.tag, self.now)
            self._enter(tenant)

    def head(self) -> Waiting | None:
        """The request that is to be served next."""
        while self._ready:
            _, entry, tenant = self._ready[0]
            if entry == tenant.entry and tenant.requests:
                return next(iter(tenant.requests.values()))
            heapq.heappop(self._ready)
        return None

    def pop(self) -> Waiting:
        """Take the head out and charge its tenant. Raises IndexError when nothing waits."""
        head = self.head()
        if head is None:
            raise IndexError("no request waits")
        tenant = self._tenants[head.demand.tenant]
        self.now = max(self.now, tenant.tag)
        tenant.tag += head.cost
        self._take(tenant, head)
        if tenant.requests:
            self._enter(tenant)
        self._forget_idle()
        return head

    def remove(self, name: str, request_id: str) -> Waiting | None:
        """Take a request out wherever it is; None when it does not wait here."""
        tenant = self._tenants.get(name)
        waiting = tenant.requests.get(request_id) if tenant is not None else None
        if tenant is not None and waiting is not None:
            self._take(tenant, waiting)
        return waiting

    def settle(self, name: str, difference: float) -> None:
        """A served request cost that much more than was expected."""
        tenant = self._tenants.get(name)
        if tenant is not None:  # else it has long been overtaken by the virtual time
            tenant.tag += difference
            self._enter(tenant)

    def num_of(self, name: str) -> int:
        """How many requests of a tenant wait."""
        tenant = self._tenants.get(name)
        return len(tenant.requests) if tenant is not None else 0

    def cost_of(self, name: str) -> float:
        """Of the requests of a tenant that wait."""
        tenant = self._tenants.get(name)
        return tenant.cost if tenant is not None else 0.0

    def waiting(self) -> list[Waiting]:
        """Everything that waits, tenant by tenant."""
        return [w for tenant in self._tenants.values() for w in tenant.requests.values()]

    def _take(self, tenant: _Tenant, waiting: Waiting) -> None:
        tenant.requests.pop(waiting.demand.request_id)
        self._count(tenant, -waiting.cost, -1)
        if not tenant.requests:
            self.num_tenants -= 1
            self._enter(tenant)

    def _count(self, tenant: _Tenant, cost: float, num: int) -> None:
        tenant.cost += cost
        self.cost += cost
        self.num_requests += num

    def _enter(self, tenant: _Tenant) -> None:
        """Put the tenant where its tag says; an earlier entry of it is void."""
        self._num_entries += 1
        tenant.entry = self._num_entries
        heapq.heappush(self._ready if tenant.requests else self._idle, (tenant.tag, tenant.entry, tenant))

    def _forget_idle(self) -> None:
        """A tenant without requests whose tag has passed is as good as new."""
        while self._idle and self._idle[0][0] <= self.now:
            _, entry, tenant = heapq.heappop(self._idle)
            if entry == tenant.entry and not tenant.requests:
                del self._tenants[tenant.name]
