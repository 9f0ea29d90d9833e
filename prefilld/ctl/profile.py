"""`prefillctl profile`"""

from common import ctl_profile

VERB = ctl_profile.profile("prefilld", decodes=False)
