"""The study of whole workloads: a model's step from end to end, by several ways of communicating."""
