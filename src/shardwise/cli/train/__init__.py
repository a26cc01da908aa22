"""The reference trainer behind ``shardwise train``: a small GPT over bytes, sharded by shardwise.

Read in this order: ``config`` (what can be set), ``corpus`` (what is read), ``model``, ``engine``
(the calls to shardwise), ``loop`` (the training loop), ``parity`` and ``reference`` (the proof
against one plain process), ``table`` and ``summary`` (what a run ends with), ``command`` (the
order of it all).
"""
