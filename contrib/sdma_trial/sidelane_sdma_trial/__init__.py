"""A trial of the packets of AMD's copy engines on the GPUs of a machine, and the queues that it fills."""
