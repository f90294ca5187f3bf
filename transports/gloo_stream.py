"""The two halves of `transports.stream` over a collective group: rank 0 broadcasts, all receive.

A round begins with agreement: each reader announces what it is about to take (round, plan, digest
kind), and rank 0 moves no byte before all of them said the same as it would. Sizes that differ in
a broadcast would end the process. It ends with each reader's word that all of it arrived and was
right; that a broadcast returned at rank 0 says nothing about the others.

A half that leaves a round before its end, for whatever reason, ends the group, so that nobody waits
for it. The group is dead then: a new one is made for the next round.
"""

from __future__ import annotations

from transports.gloo_receiver import GlooReceiver
from transports.gloo_sender import GlooSender

__all__ = ["GlooReceiver", "GlooSender"]
