"""`decodectl config`"""

from common import ctl_verbs

VERB = ctl_verbs.config("decoded")
