"""One training step over the ranks.

Read in the order topology, collectives, chunk, reducer, gatherer, engine.

- ``topology``, ``collectives``, ``agreement``, ``worker``: who takes part, how bytes travel.
- ``facts``: what ranks tell each other at the end of a backward pass.
- ``divergence``: which rank went another way, when a communication fails.
- ``managed``, ``chunk``, ``build``, ``materialise``: parameters packed into flat buffers.
- ``gradient_hooks``, ``intake``, ``reducer``, ``reduction``, ``placeholder``: gradients, from
  autograd's hooks to reduced slices.
- ``absent``, ``values``, ``publisher``: parameters without values, and what brings them.
- ``units``, ``gatherer``, ``uses``, ``handles``, ``whole_state``, ``residence``: stage 3.
- ``norms``, ``loss_scaling``, ``containers``: numbers and values beside them.
- ``engine``, ``root``: the parts put together, and the calls of the model around them.
"""
