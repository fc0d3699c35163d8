"""The last that the fork server imports: what it holds is not looked through again by the collectors of its forks.

They would write to each object, and so copy all memory that the fork shares: a third of a second each.
"""

import gc

gc.collect()
gc.freeze()
