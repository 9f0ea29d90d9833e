"""`decodectl profile`"""

from common import ctl_profile

VERB = ctl_profile.profile("decoded", decodes=True)
