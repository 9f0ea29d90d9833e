"""`decodectl resume`"""

from common import ctl_verbs

VERB = ctl_verbs.resume("decoded")
