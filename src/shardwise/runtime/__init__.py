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
- ``own_slices``, ``state_slices``, ``mover``, ``homes``, ``offload``: slices in other tiers.
- ``meter``, ``activations``, ``recorder``, ``limits``, ``adaptation``, ``lockstep``: what a step
  takes, and homes that follow it within budgets.
- ``norms``, ``loss_scaling``, ``containers``: numbers and values beside them.
- ``engine``, ``root``, ``repacking``: the parts put together, and the calls around them.
"""
