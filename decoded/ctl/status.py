"""`decodectl status`"""

from common import ctl_verbs

VERB = ctl_verbs.status("decoded")
