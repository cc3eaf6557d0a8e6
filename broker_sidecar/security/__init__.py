"""Authentication and permissions of callers. `gate.py` in the parent folder applies them to every call; begin there.

`authentication.py` and `tokens.py` find the caller (`subject.py`). `permissions.py` judges calls and frames by
`rules.py`. `audit.py` decides what the audit trail records, and writes it. `watched_files.py` reads files again that an
operator replaces.
"""
