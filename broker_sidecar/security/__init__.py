"""Who calls, and what they may do. `gate.py`, above, asks all of it for every call; begin there.

`authentication.py` and `tokens.py` find out the `subject.py`; `permissions.py` judges calls and frames by `rules.py`;
`audit.py` says what of that stands in the audit trail, and writes it; `watched_files.py` reads again what an operator
replaces.
"""
