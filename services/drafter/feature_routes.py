"""Which sequence reads which verifier's features; one subscription per verifier, opened on demand.

The servicer sets routes, the draft loop's thread drops them; everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import threading

from paceline.v1 import peer_pb2
from services.drafter.features import Route, Subscription
from services.drafter.inbox import DrafterInbox
from services.runtime.tls import Tls


class FeatureRoutes:
    """All subscriptions, and the sequences that read them."""

    def __init__(self, info: peer_pb2.PeerInfo, inbox: DrafterInbox, tls: Tls | None) -> None:
        self._info = info
        self._inbox = inbox
        self._tls = tls
        self._lock = threading.Lock()
        self._subscriptions: dict[str, Subscription] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._routed: dict[int, tuple[Subscription, int, Route]] = {}  # by local id

    def route(self, endpoint: str, instance_id: str, sequence_id: int, local_id: int) -> None:
        """Routes one of a verifier's sequences, and subscribes to the verifier first; on the event loop's thread."""
        subscription = self._subscriptions.get(endpoint)
        if subscription is None:
            subscription = Subscription(endpoint, self._info, self._inbox, self._tls)
            self._subscriptions[endpoint] = subscription
            self._tasks[endpoint] = asyncio.create_task(subscription.run())
        route = Route(local_id, instance_id)
        with self._lock:
            self._routed[local_id] = (subscription, sequence_id, route)
            subscription.routes[sequence_id] = route

    def replay(self, local_id: int) -> None:
        """Forwards what came in before `route`, once the loop knows the sequence; on the event loop's thread."""
        with self._lock:
            routed = self._routed.get(local_id)
        if routed is not None:
            subscription, sequence_id, route = routed
            subscription.replay(sequence_id, route)

    def drop(self, local_id: int) -> None:
        """Forgets a sequence, unless its id has been routed again; any thread may call it."""
        with self._lock:
            routed = self._routed.pop(local_id, None)
            if routed is not None:
                subscription, sequence_id, route = routed
                if subscription.routes.get(sequence_id) is route:
                    del subscription.routes[sequence_id]

    async def close(self) -> None:
        """Ends all subscriptions."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
