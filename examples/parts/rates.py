"""The note that examples print before rates that were measured on CPU ranks."""

ON_CPUS = "CPU ranks: these rates show that the program runs. Only GPUs show which way is faster."
INTERPRETED = (
    "CPU ranks: Triton's interpreter runs the kernels as Python code, far slower than a GPU does. These rates show "
    "that the results agree. Only GPUs show which way is faster."
)
