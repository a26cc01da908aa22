"""One training step over the ranks.

Read in the order topology, collectives, chunk, reducer, engine.

- ``topology``, ``collectives``, ``agreement``, ``worker``: who takes part, how bytes travel.
- ``facts``: what ranks tell each other at the end of a backward pass.
- ``managed``, ``chunk``, ``build``: parameters packed into flat buffers.
- ``reducer``, ``reduction``, ``placeholder``: gradients, from autograd's hooks to reduced slices.
- ``publisher``: updated slices back to every rank.
- ``norms``, ``loss_scaling``, ``containers``: numbers and values beside them.
- ``engine``, ``root``: the parts put together, and the calls of the model around them.
"""
