"""`decodectl version`"""

from common import ctl_verbs

VERB = ctl_verbs.version("decoded")
