"""Authentication and permissions of callers. `gate.py` in the parent folder applies them to every call. Begin with
`gate.py`.

`authentication.py` and `tokens.py` find the caller (`subject.py`). `permissions.py` judges calls and frames by
`rules.py`. `audit.py` decides what the audit trail records, and writes it. If an operator replaces a file,
`watched_files.py` reads the new file.
"""
