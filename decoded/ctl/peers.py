"""`decodectl peers`"""

from common import ctl_verbs

VERB = ctl_verbs.peers("decoded")
