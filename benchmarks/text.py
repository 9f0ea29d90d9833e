"""Real English text of any length, the same everywhere: Python's own language reference, as shipped with it."""

from __future__ import annotations

import pydoc_data.topics


def real_text(num_chars: int, skip: int = 0) -> str:
    """`num_chars` characters of prose from position `skip` on.

    Raises:
        ValueError: there is not so much of it.
    """
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    if skip + num_chars > len(text):
        raise ValueError(f"{skip} + {num_chars} characters wanted, {len(text)} there")
    return text[skip : skip + num_chars]
