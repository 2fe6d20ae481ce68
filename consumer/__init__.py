"""The drafter's side: blocks from the ring, the DFlash drafter, its loss, checkpoints and acceptance length."""
