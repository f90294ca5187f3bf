"""The shared-memory stream: CPU tensors to readers on the same host, without a network.

Theory of operation. One sender, any number of readers of the same memory; every chunk of the plan
is written once. Bytes lie in an anonymous segment (`transports.segments`) whose descriptor goes to
each reader once, through a Unix socket (`transports.links`) that afterwards carries only tiny
messages: ``ready`` when a chunk lies in its place, ``ack`` when a reader has copied it out,
``alive`` when the trainer is busy elsewhere, ``done`` and ``complete`` at the end, ``failed`` with
a text when either side gives up.

* *Packed*: chunk k uses slot ``k % buffers`` of a ring and waits until all readers have
  acknowledged chunk ``k - buffers``. *Unpacked*: each chunk has a place of its own.
* *Resident* tensors, which live in shared memory themselves (`share_tensors`), are not copied by
  the trainer: the reader has their handles and copies from where they are when their chunk is
  announced. They must not change before `finish` returns.
* With digests on, the trainer hashes what readers are shown, and a reader hashes what it has
  written to its destination: that is what will be committed.
* A connection belongs to one round and dies with it, on both sides, whatever ends it; segments,
  views, address and token stay. So a reader of an earlier round cannot acknowledge anything in a
  later one, and what it still copies from a reused slot it can never commit.
* No side believes the other: sizes, offsets and descriptors are checked, segments are sealed
  against shrinking, a peer of another user or without the token is refused.
"""

from transports.sharing import SharedStorage, share_tensors
from transports.shm_receiver import ShmReceiver
from transports.shm_sender import ShmSender

__all__ = ["SharedStorage", "ShmReceiver", "ShmSender", "share_tensors"]
