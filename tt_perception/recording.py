# SPDX-License-Identifier: Apache-2.0
"""What there is for a detector in a rosbag2: its clouds, and whether transforms lead to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tt_perception.runtime.errors import InputError

WORLD_FRAME = 'map'


@dataclass(frozen=True)
class CloudHead:
    """What a cloud says of itself."""

    stamp_ns: int
    frame_id: str
    num_points: int


@dataclass(frozen=True)
class Recording:
    """The clouds of one topic of a bag.

    :ivar tf_topics: every topic with transforms.
    :ivar has_pose: transforms connect ``WORLD_FRAME`` with the frame of the clouds.
    """

    bag: Path
    topic: str
    clouds: tuple[CloudHead, ...]
    tf_topics: tuple[str, ...]
    has_pose: bool


def read_recording(bag: Path) -> Recording:
    """Look through a bag once.

    Of several topics with clouds, the simulated drive's (which is Autoware's) comes first, then
    the one with the most clouds.

    :raises InputError: it cannot be read, or holds no cloud.
    """
    from tt_perception.ros.bag import CLOUD_TYPE, TF_TYPE
    from tt_perception.ros.conversions import stamp_to_ns
    from tt_perception.sim.bag import CLOUD_TOPIC
    heads: dict[str, list[CloudHead]] = {}
    edges: list[tuple[str, str]] = []
    tf_topics: set[str] = set()
    for topic, message in messages(bag, CLOUD_TYPE, TF_TYPE):
        if hasattr(message, 'transforms'):
            tf_topics.add(topic)
            edges += [(t.header.frame_id.lstrip('/'), t.child_frame_id.lstrip('/'))
                      for t in message.transforms]
        else:
            heads.setdefault(topic, []).append(CloudHead(
                stamp_to_ns(message.header.stamp), message.header.frame_id,
                message.width * message.height))
    if not heads:
        raise InputError(f'{bag}: found no message of type {CLOUD_TYPE}, expected some',
                         reason='bag')
    topic = max(heads, key=lambda name: (name == CLOUD_TOPIC, len(heads[name])))
    frame = heads[topic][0].frame_id.lstrip('/')
    return Recording(bag, topic, tuple(heads[topic]), tuple(sorted(tf_topics)),
                     _connected(edges, WORLD_FRAME, frame))


def messages(bag: Path, *types: str) -> Iterator[tuple[str, Any]]:
    """Yield topic and message, of these types only.

    :raises InputError: the bag cannot be read, or a message is damaged.
    """
    from rosbags.typesys import Stores, get_typestore

    from tt_perception.ros.bag import BagReader
    store = get_typestore(Stores.ROS2_JAZZY)
    with BagReader(bag) as reader:
        for topic, _, raw in reader.messages([t for t in reader.topics if t.type in types]):
            try:
                message = store.deserialize_cdr(raw, topic.type)
            except Exception as error:  # whatever the parser meets in damaged bytes
                raise InputError(f'{bag}: found a message on {topic.name} that is no {topic.type}',
                                 reason='bag') from error
            yield topic.name, message


def _connected(edges: Sequence[tuple[str, str]], a: str, b: str) -> bool:
    """Return whether transforms lead from one frame to the other, at some time."""
    reached, grows = {a}, True
    while grows:
        more = {frame for edge in edges for frame in edge if reached & set(edge)}
        grows = not more <= reached
        reached |= more
    return b in reached
