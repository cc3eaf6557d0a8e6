"""The reader job: topics into a table, each message once.

Begin with `rounds`: a round is planned from the stored `positions`, and its ranges are taken by tasks (`range_task`),
each in one transaction of a store. What cannot be written goes aside as `dead_letter_rows`.
"""
