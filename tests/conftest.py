"""One thread per process: several processes share few cores, and threads that wait for each other starve them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
