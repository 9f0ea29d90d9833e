"""`prefillctl requests`"""

from common import ctl_verbs

VERB = ctl_verbs.requests("prefilld")
