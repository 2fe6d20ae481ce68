"""How much one micro-step holds at once, by device type. Constants only: the launcher reads them without torch.

They bound memory at any number of anchors and any vocabulary; how the work is cut changes rounding at most.
"""

# Attention scores held at once, per softmax (fp32, so four bytes each).
SCORES_PER_CHUNK = 1 << 24
# The same for the padded batches of a GPU, whose launches cost more than its memory: 512 MiB.
SCORES_PER_BATCH = 1 << 27
# Rows per head product. Measured on one AMX core (576 x 49152, bf16): below 448 rows the products lose up to half
# their rate. On an H200 (4096 x 151936) 512 and 3840 rows are equally fast.
CHUNK_ROWS = {"cpu": 448, "cuda": 1024}
# fp32 elements per softmax tile of a CPU (measured there: four times as many are a tenth slower, fewer no faster).
TILE_ELEMENTS = 1 << 21
# Blocks that lie on the device ahead of the one in training: one that is next, one that is arriving.
DEPTH = 2
# Heads narrower than this are not taken by the GPU's attention kernel.
LEAST_HEAD_DIM = 16
