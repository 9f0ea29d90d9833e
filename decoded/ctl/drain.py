"""`decodectl drain`"""

from common import ctl_verbs

VERB = ctl_verbs.drain("decoded")
