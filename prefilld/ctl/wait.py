"""`prefillctl wait`"""

from common import ctl_verbs

VERB = ctl_verbs.wait("prefilld")
