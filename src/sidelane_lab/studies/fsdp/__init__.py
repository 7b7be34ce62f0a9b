"""The study of training steps whose layers FSDP2 shards."""
