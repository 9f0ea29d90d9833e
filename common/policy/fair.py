"""Who is served next over all classes: a guaranteed share for each, the rest by priority; within a class tenants.py.

A class that has requests is due once its guaranteed service lags behind its share of all service; among those that are
due the longest due goes first (eligible-first order as in WF2Q, Bennett and Zhang, INFOCOM 1996; guarantee apart from
the rest as in H-FSC, Stoica, Zhang, Ng, SIGCOMM 1997). Only where nobody is due does priority count, and what is served
then is not held against the guarantee. Pure; used by admission.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from common.policy.asked import Asked
from common.policy.tenants import TenantQueue, Waiting
from common.policy.views import Demand, ServiceClass

# Weight of the latest request in the mean of what they cost.
COST_WEIGHT = 1 / 32


@dataclass(frozen=True, slots=True)
class Charge:
    """What was charged for a request that was taken out to be served, and to which queue."""

    demand: Demand
    cost: float
    is_due: bool
    queue: ClassQueue


@dataclass(slots=True, eq=False)
class ClassQueue:
    """One class. `due_at` and `spare_tag` are instants of all service, in tokens; `spare_tag` orders classes of equal
    priority where nobody is due.
    """

    facts: ServiceClass
    tenants: TenantQueue = field(default_factory=TenantQueue)
    num_tokens: int = 0
    due_at: float = 0.0
    spare_tag: float = 0.0
    asked: Asked = field(default_factory=Asked)


class FairQueue:
    """All that waits. Classes are few: operations are O(classes + log tenants)."""

    served: float
    """All service so far, in tokens."""
    num_tokens: int
    """Prompt tokens that wait."""
    classes: dict[str, ClassQueue]
    mean_cost: float
    """Of what is asked for, in tokens."""

    def __init__(self, classes: Sequence[ServiceClass] = ()) -> None:
        self._start(classes)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._where

    def class_of(self, name: str) -> ClassQueue:
        """The class of that name, or the first one."""
        return self.classes.get(name) or next(iter(self.classes.values()))

    def ask(self, demand: Demand, cost: float, now: float) -> None:
        """Somebody asks for so much, and is let in or not."""
        self.class_of(demand.service_class).asked.note(demand.tenant, cost, now)
        self.mean_cost = self.mean_cost + COST_WEIGHT * (cost - self.mean_cost) if self.mean_cost else cost

    def push(self, demand: Demand, cost: float) -> None:
        """Queue a request that is expected to cost so many tokens of service."""
        queue = self.class_of(demand.service_class)
        if not queue.tenants.num_requests:
            # What it did not ask for is not owed to it.
            queue.due_at = max(queue.due_at, self.served)
            queue.spare_tag = max(queue.spare_tag, self._spare_now.get(queue.facts.priority, 0.0))
        queue.tenants.push(Waiting(demand, cost))
        queue.num_tokens += demand.num_prompt_tokens
        self.num_tokens += demand.num_prompt_tokens
        self._where[demand.request_id] = demand

    def head(self, without: Collection[str] = ()) -> Demand | None:
        """The request that is to be served next, of other classes than those."""
        queue, _ = self._next(without)
        head = queue.tenants.head() if queue is not None else None
        return head.demand if head is not None else None

    def pop(self, without: Collection[str] = ()) -> Charge:
        """Take that request out and charge its class and tenant. Raises IndexError when none waits."""
        queue, is_due = self._next(without)
        if queue is None:
            raise IndexError("no request waits")
        waiting = queue.tenants.pop()
        self._forget(queue, waiting.demand)
        charge = Charge(waiting.demand, waiting.cost, is_due, queue)
        if not is_due:
            priority = queue.facts.priority
            self._spare_now[priority] = max(self._spare_now.get(priority, 0.0), queue.spare_tag)
        self._charge(queue, waiting.cost, is_due=is_due)
        return charge

    def remove(self, request_id: str) -> Demand | None:
        """Take a request out that is not to be served; None when it does not wait."""
        demand = self._where.get(request_id)
        if demand is None:
            return None
        queue = self.class_of(demand.service_class)
        queue.tenants.remove(demand.tenant, request_id)
        self._forget(queue, demand)
        return demand

    def settle(self, charge: Charge, cost: float) -> None:
        """A served request has ended, and this is what it did cost.

        What was charged before other classes were taken over is in no counter any more.
        """
        queue, difference = charge.queue, cost - charge.cost
        if self.classes.get(queue.facts.name) is not queue:
            return
        self._charge(queue, difference, is_due=charge.is_due)
        queue.tenants.settle(charge.demand.tenant, difference)

    def cost_before(
        self, demand: Demand, now: float = 0.0, pace: float = 0.0, num_running: int = 0, max_running: int = 0
    ) -> float:
        """About what is served before this request, if it came now and others go on asking as they do: in tokens, its
        own not counted.

        Of its class, that is all that waits and what its other tenants ask for meanwhile; or as much of each of those
        as its own tenant has waiting. Before it are higher classes' requests too, and its class has only a part of all
        service; or none of theirs, and its class has its share. Whatever is less. One more request may be ahead where
        a class has only a part, and those of the class that run in excess of that part must end first.

        Args:
            pace: tokens of service per second; 0: not known, as if nobody asked for more.
            num_running: of its class, of `max_running` in all.
        """
        queue = self.class_of(demand.service_class)
        tenants, facts = queue.tenants, queue.facts
        turns = tenants.cost_of(demand.tenant) * max(1, tenants.num_tenants, queue.asked.num_tenants(now))
        others = queue.asked.others_per_s(demand.tenant, now) / pace if pace else 0.0
        is_above = (q for q in self._waiting((facts.name,)) if q.facts.priority >= facts.priority)
        above, costs = sum(q.tenants.cost for q in is_above), [inf]
        for part, before in ((self._part_of(queue, now, pace), above), (facts.share, 0.0)):
            before += self.mean_cost * (1.0 - part + max(0.0, num_running - part * max_running))
            costs.append((turns + before) / part)
            if part > others:
                costs.append((tenants.cost + before) / (part - others))
        return min(costs)

    def _part_of(self, queue: ClassQueue, now: float, pace: float) -> float:
        """Of all service, what a class has: its share at least, and what higher ones do not ask for, nor lower ones
        that are sure of it.
        """
        part = 1.0
        for other in self.classes.values():
            if other is queue or not pace:
                continue
            asked = other.asked.total.per_s(now) / pace
            is_above = other.facts.priority >= queue.facts.priority
            part -= asked if is_above else min(asked, other.facts.share)
        return max(part, queue.facts.share)

    def reclassify(self, classes: Sequence[ServiceClass]) -> None:
        """Take over other classes (reload); what waits stays, in the first class where its own is gone."""
        if [c.facts for c in self.classes.values()] == list(classes or (ServiceClass(),)):
            return
        waiting = [w for queue in self.classes.values() for w in queue.tenants.waiting()]
        self._start(classes)
        for each in waiting:
            self.push(each.demand, each.cost)

    def _start(self, classes: Sequence[ServiceClass]) -> None:
        self.served, self.num_tokens, self.mean_cost = 0.0, 0, 0.0
        self.classes = {facts.name: ClassQueue(facts) for facts in classes or (ServiceClass(),)}
        self._spare_now: dict[int, float] = {}  # by priority
        self._where: dict[str, Demand] = {}

    def _waiting(self, without: Collection[str]) -> Iterator[ClassQueue]:
        return (q for n, q in self.classes.items() if q.tenants.num_requests and n not in without)

    def _next(self, without: Collection[str]) -> tuple[ClassQueue | None, bool]:
        """The class to serve, and whether it is due."""
        waiting = list(self._waiting(without))
        due = [q for q in waiting if q.due_at <= self.served]
        if due:
            return min(due, key=lambda q: q.due_at), True
        return min(waiting, key=lambda q: (-q.facts.priority, q.spare_tag), default=None), False

    def _charge(self, queue: ClassQueue, cost: float, *, is_due: bool) -> None:
        self.served += cost
        if is_due:
            queue.due_at += cost / queue.facts.share
        else:
            queue.spare_tag += cost / queue.facts.share

    def _forget(self, queue: ClassQueue, demand: Demand) -> None:
        del self._where[demand.request_id]
        queue.num_tokens -= demand.num_prompt_tokens
        self.num_tokens -= demand.num_prompt_tokens
