"""`prefillctl status`"""

from common import ctl_verbs

VERB = ctl_verbs.status("prefilld")
