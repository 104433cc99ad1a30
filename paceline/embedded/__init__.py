"""Everything on one machine: child processes that `paceline up` starts and stops.

:class:`paceline.embedded.deployment.Deployment` is the whole; the other files are its parts.
"""

from paceline.embedded.deployment import Deployment
from paceline.embedded.options import DeploymentOptions, Placement
from paceline.embedded.ports import Ports

__all__ = ["Deployment", "DeploymentOptions", "Placement", "Ports"]
