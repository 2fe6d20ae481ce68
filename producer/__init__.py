"""The target's side: chat data to tokens, the frozen forward pass, taps, and the blocks they fill."""
