"""The reader job: topics into a table, each message once."""
