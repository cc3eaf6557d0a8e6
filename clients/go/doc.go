// Package seqdedupe is the client of seqdedupe: a sidecar that stores each message (producer name, sequence ID), or each
// deduplication ID, exactly once, no matter how often a client sends it.
//
// Begin with [NewClient]. A [Producer] publishes under a name, a [Publisher] publishes by deduplication IDs, and a
// [Reader] reads a topic. Every error is an [*Error] with a stable reason, and has a kind such as [ErrFenced].
package seqdedupe
