"""Training a policy that writes memories by reinforcement learning (MemBuilder, SaliMory)."""
