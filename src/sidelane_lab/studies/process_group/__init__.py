"""The study of process groups: a program that calls ``torch.distributed``, on NCCL's group and on Sidelane's."""
