"""Whose chunk comes next, by due times where there are any; without, see test_scheduler.py."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from common.sched.turns import Turns


@dataclass(slots=True, eq=False)
class Prompt:
    """What turns look at."""

    seq_id: int
    num_remaining: int
    due_at: float = inf
    priority: int = 0
    arrived_at: float = 0.0
    last_turn: int = 0


def order_of(prompts: list[Prompt], token_s: float = 1.0) -> list[int]:
    """Who gets each turn of one token, from 0 on, until all are done."""
    turns, now, order = Turns(), 0.0, []
    for prompt in prompts:
        turns.join(prompt)
    while waiting := [p for p in prompts if p.num_remaining]:
        chosen = turns.take(waiting, now, lambda p: p.num_remaining * token_s)
        assert chosen is not None
        chosen.num_remaining -= 1
        order.append(chosen.seq_id)
        now += token_s
    return order


def test_the_earliest_due_is_computed_whole() -> None:
    assert order_of([Prompt(0, 3, 20.0), Prompt(1, 2, 6.0), Prompt(2, 1)]) == [1, 1, 0, 0, 0, 2]


def test_one_that_would_make_others_late_is_put_off() -> None:
    assert order_of([Prompt(0, 5, 5.0), Prompt(1, 2, 5.5), Prompt(2, 2, 6.0)]) == [1, 1, 2, 2, 0, 0, 0, 0, 0]


def test_where_nothing_is_known_of_the_speed_the_earliest_due_goes_first() -> None:
    turns, prompts = Turns(), [Prompt(0, 5, 5.0), Prompt(1, 2, 4.0)]
    assert [turns.take(prompts, 0.0, lambda _: 0.0).seq_id for _ in range(3)] == [1, 1, 1]  # type: ignore[union-attr]


def test_every_other_turn_knows_the_highest_priority_alone() -> None:
    assert order_of([Prompt(0, 2, 9.0), Prompt(1, 3, 99.0, priority=1)]) == [1, 0, 1, 0, 1]


def test_without_due_times_turns_go_round() -> None:
    assert order_of([Prompt(0, 4), Prompt(1, 4), Prompt(2, 2)])[:4] == [2, 0, 2, 1]
