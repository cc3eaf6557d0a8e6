"""Effectively-once publishing and consumption for any message log.

The client lives in `seqdedupe.client`; this package's top level has what everybody may import:
`message_id`, `errors`, `names` and `batch`.
"""
