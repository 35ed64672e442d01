"""Data parallelism: gradient buckets, ZeRO stages 0 to 2 on flat parameters, and stage 3 by FSDP2."""
