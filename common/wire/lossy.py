"""What the lossy codecs are, in numbers: for those who must know before numpy may be imported, too.

numpy's libraries read thread counts when they are imported, and those are set only once the configuration is checked.
The codecs themselves are in quantise.py.
"""

from __future__ import annotations

GROUP_TOKENS, GROUP_CHANNELS = 256, 128
LEVELS = {"q8": 256, "q4": 24}
LOSSY = tuple(LEVELS)
