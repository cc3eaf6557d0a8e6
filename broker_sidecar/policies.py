"""The calls of AdminService that are about policies, of topics and of namespaces."""

from typing import Any

from broker_sidecar.peers import Peers
from broker_sidecar.topics import policy_of, policy_to_proto, topic_to_proto
from seqdedupe.errors import error
from seqdedupe.names import namespace_name
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lookup import find
from seqdedupe.topic.policy import Policy
from seqdedupe.v1 import admin_pb2


class Policies:
    """The handlers. `peers` have the other shards, if there are some."""

    def __init__(self, topics: Topics[Any], peers: Peers | None) -> None:
        self._topics = topics
        self._peers = peers

    async def of_topic(self, request: admin_pb2.GetTopicPolicyRequest) -> admin_pb2.GetTopicPolicyResponse:
        topic = await find(self._topics, request.topic)
        policy, applied = policy_to_proto(topic.policy), policy_to_proto(topic.applied)
        return admin_pb2.GetTopicPolicyResponse(policy=policy, applied=applied)

    async def set_of_topic(self, request: admin_pb2.SetTopicPolicyRequest) -> admin_pb2.SetTopicPolicyResponse:
        topic = await find(self._topics, request.topic)
        policy = self._given(request.policy).check_fits(by_deduplication_id=topic.window is not None)
        await topic.set_policy(topic.newest_policy.with_values_of(policy))
        return admin_pb2.SetTopicPolicyResponse(topic=topic_to_proto(topic))

    async def remove_of_topic(self, request: admin_pb2.RemoveTopicPolicyRequest) -> admin_pb2.RemoveTopicPolicyResponse:
        topic = await find(self._topics, request.topic)
        await topic.set_policy(topic.newest_policy.without(list(request.values)))
        return admin_pb2.RemoveTopicPolicyResponse(topic=topic_to_proto(topic))

    async def of_namespace(self, request: admin_pb2.GetNamespacePolicyRequest) -> admin_pb2.GetNamespacePolicyResponse:
        namespace = namespace_name(request.namespace)
        self._topics.ownership.check(namespace)
        policy, applied = self._of(namespace)
        return admin_pb2.GetNamespacePolicyResponse(policy=policy, applied=applied)

    async def set_of_namespace(
        self, request: admin_pb2.SetNamespacePolicyRequest
    ) -> admin_pb2.SetNamespacePolicyResponse:
        namespace = namespace_name(request.namespace)
        given = self._given(request.policy)
        if self._peers is not None and not request.only_here:
            return await self._peers.everywhere("SetNamespacePolicy", request, self.set_of_namespace)
        await self._topics.namespaces.change(namespace, lambda policy: policy.with_values_of(given))
        policy, applied = self._of(namespace)
        return admin_pb2.SetNamespacePolicyResponse(policy=policy, applied=applied)

    async def remove_of_namespace(
        self, request: admin_pb2.RemoveNamespacePolicyRequest
    ) -> admin_pb2.RemoveNamespacePolicyResponse:
        namespace, values = namespace_name(request.namespace), list(request.values)
        if self._peers is not None and not request.only_here:
            Policy().without(values)
            return await self._peers.everywhere("RemoveNamespacePolicy", request, self.remove_of_namespace)
        await self._topics.namespaces.change(namespace, lambda policy: policy.without(values))
        policy, applied = self._of(namespace)
        return admin_pb2.RemoveNamespacePolicyResponse(policy=policy, applied=applied)

    def _given(self, message: admin_pb2.TopicPolicy) -> Policy:
        """What a request sets, which has to be something."""
        policy = policy_of(message)
        if policy == Policy():
            raise error("INVALID_REQUEST", "policy is missing or sets nothing: say at least one value")
        return policy.check_has_effect(self._topics.kind.log)

    def _of(self, namespace: str) -> tuple[admin_pb2.TopicPolicy, admin_pb2.TopicPolicy]:
        namespaces = self._topics.namespaces
        return policy_to_proto(namespaces.policy(namespace)), policy_to_proto(namespaces.applied(namespace))
