"""The `gluon` implementation: a persistent, warp-specialised kernel for Hopper.

Shape legend of these files: B batch, H heads, S tokens, D head dim, DP D rounded up to 64 or 128,
M query rows of a tile, N keys of a chunk, G blocks of 128 query rows, R = 128 / M tiles of a block,
C length of a row of ``kv_index``; a step is BN keys, CHUNKS = BN / N of them.

One program runs on each multiprocessor and takes blocks until none is left (``schedule``). Its
producer gathers keys and values into a ring in shared memory; two consumers, warpgroups of 64 query
rows each, multiply and weigh them. ``kernel`` lays out the memory and starts all three, ``launch``
is what other files call.

A stage of the ring holds the keys of one step and the values of the step before it, which are the
operands of the two products that a consumer has in flight together. The first step of a block
shares its stage with the last values of the block before, so that the ring, and the overlap, never
break off between blocks.

Gates and 8-bit operands are compiled in where they are asked for; the plain kernel's code is the
same without them.

Barriers, each with a running phase bit that is never reset:

======== ============================= ==================================== =====================
name     completed by                  waited for by                        guards
======== ============================= ==================================== =====================
full     bytes of TMA / cp.async       consumers, before a step's products  a stage
empty    both consumers                producer, before it refills          a stage
q_full   the producer (and q's bytes)  consumers, before a block            q and the block record
q_empty  both consumers                producer, before the next block      q and the block record
======== ============================= ==================================== =====================
"""
