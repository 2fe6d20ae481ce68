"""What producers, consumers and the coordinator agree on: messages, memory layout, plan and ledger.

Imports neither torch nor transformers, so that the coordinator and the command line start at once.
"""
