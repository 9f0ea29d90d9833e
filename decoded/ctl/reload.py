"""`decodectl reload`"""

from common import ctl_verbs

VERB = ctl_verbs.reload("decoded")
