"""The reader job: it writes topics into a table, each message once.

Begin with `rounds`. A round is planned from the stored positions. Tasks (`range_task`) process its ranges, each in
one transaction of a store. Messages that cannot be written become dead letters.
"""
