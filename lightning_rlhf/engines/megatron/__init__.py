"""The megatron back end: the real megatron-core, with TP, SP, PP, VPP, EP, ETP and CP."""
