"""The reader job: topics into a table, each message once.

Begin with `rounds`. A round is planned from the stored `positions`. Tasks (`range_task`) take its ranges, each in one
transaction of a store. Messages that cannot be written go aside as `dead_letter_rows`.
"""
