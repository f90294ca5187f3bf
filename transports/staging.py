"""One staging copy for all ranks of a host: one of them receives, every one of them reads.

Theory of operation. The rank that receives (`LeadReceiver`) has a receiver of some transport; what
that writes lies in an anonymous segment (`transports.segments`). The others (`FollowReceiver`)
connect to it once a round, through a Unix socket (`transports.links`).

* **Mapped before the first byte.** `map` is called by every rank. The lead waits until all others
  have introduced themselves, passes the descriptor to those who lack the segment, and returns once
  each has mapped it. Only then does it go and receive. Memory of a memfd lives as long as somebody
  maps it: once the data is there, no rank's death takes it from the others.
* **Written between rounds only.** The lead writes again when everybody who was given the segment
  has said hello to the new round, which a rank does when it is through with the old one. Where one
  of them does not come, or has let go of it (a loader may have kept a tensor), all others unmap the
  old segment and get a new one.
* **Read only.** The others map it privately: what a loader writes to the tensors it is given,
  nobody else sees. The lead has such a mapping beside its own (`StagingMemory.private`).
* **All or none.** The lead's last word, after its transport has verified the bytes, is ``done``
  with their digest; each rank confirms. A rank that fails drops its connection, and with it the
  others' round.
"""

from transports.staging_follow import FollowReceiver
from transports.staging_lead import LeadReceiver
from transports.staging_memory import StagingMemory

__all__ = ["FollowReceiver", "LeadReceiver", "StagingMemory"]
