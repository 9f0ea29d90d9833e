"""`decodectl cache`"""

from common import ctl_verbs

VERB = ctl_verbs.cache("decoded")
